"""`ParallelConfig`: one model in several processes."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from penstock.config.settings import FLAG, Rule, check_fields, one_of, setting
from penstock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Tensor and expert parallelism: one model in several processes, the ranks.

    Raises:
        ConfigError: a field has an invalid value, or two fields contradict each other.
    """

    tensor_parallel_size: int = setting(
        1,
        Rule("a whole number from 1 to 64", lambda value: 1 <= value <= 64),
        "Number of processes (ranks) among which a model is divided: one for each device; on a CPU the "
        "processes divide the cores.",
    )
    expert_parallel: bool = setting(
        False,
        FLAG,
        "Divide a mixture-of-experts model by experts: each process has whole experts instead of a part of "
        "each expert.",
    )
    collective_timeout: float = setting(
        120.0,
        Rule("a number of seconds above 0", lambda value: isfinite(value) and value > 0),
        "Seconds that a rank of a divided model waits for the other ranks. After this time, a server "
        "restarts the model, and other programs raise an error.",
    )
    collective_transport: str | None = setting(
        None,
        one_of("shared_memory", "torch"),
        "How the processes of a divided model exchange tensors on a CPU: shared_memory (the default) or "
        "torch (torch.distributed). On GPUs they use torch.",
    )
    pin_ranks: bool = setting(
        True,
        FLAG,
        "On a CPU with several NUMA nodes, bind each process of a divided model to the cores of one node.",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.expert_parallel and not self.is_divided:
            raise ConfigError("expert_parallel", "needs tensor_parallel_size to be 2 or more, is 1")
        if self.collective_transport is not None and not self.is_divided:
            raise ConfigError("collective_transport", "needs tensor_parallel_size to be 2 or more, is 1")

    @property
    def is_divided(self) -> bool:
        """Whether the model runs in several processes."""
        return self.tensor_parallel_size > 1
