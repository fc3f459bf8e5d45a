"""Which inputs of linear layers matter most, so that weights of few bits are true where it counts.

An error of a weight reaches the output times its input, and in trained models some inputs are a hundred
times as large as others, always the same ones (Lin et al. 2023, arXiv:2306.00978). Which ones hardly
depends on the text: 64 random tokens tell as much as a model's own sentences, and a forward of the weights
as they lie in their file, before they are quantised, is a fraction of a load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from penstock.kernels import LoRAInputs, Ops, PackedLinear, StepInputs
from penstock.pipelines.core import TextContext
from penstock.pipelines.kv_cache import KVCacheManager, KVCacheSpec

if TYPE_CHECKING:
    from penstock.pipelines.config import HuggingFaceConfig

NUM_TOKENS = 64
_BLOCK_SIZE = 32
_LEAST = 1e-6
"""Of the mean importance: what no input falls below."""


class Network(Protocol):
    """What is run: all of a model but its head."""

    @property
    def length_dependent(self) -> bool: ...

    def __call__(self, tokens: Tensor, step: StepInputs) -> tuple[Tensor, Tensor]: ...


def measure_importance(
    network: Network, spec: KVCacheSpec, ops: Ops, config: HuggingFaceConfig
) -> dict[str, Tensor]:
    """Runs some random tokens, the same each time, and looks at what the linear layers are given.

    Args:
        network: with weights that are not quantised yet.
        spec: of its KV cache.
        ops: runs it.
        config: says how many tokens there are.

    Returns:
        A layer's name -> the mean square of each input ``[in]``, by their mean; layers that are given
        something that is no finite number are missing, and so are experts.
    """
    text_config = config.section("text_config") or config  # of more than text
    vocabulary = text_config.count("vocab_size", default=1)
    tokens = np.random.default_rng(0).integers(0, vocabulary, NUM_TOKENS)
    num_blocks = [group.most_blocks(NUM_TOKENS, _BLOCK_SIZE, None) + 1 for group in spec.groups]
    kv = KVCacheManager(spec, num_blocks, _BLOCK_SIZE, enable_prefix_caching=False)
    context = TextContext(prompt=tokens.tolist(), max_length=NUM_TOKENS + 1, tokens=tokens)
    kv.claim(context)
    kv.reserve(context)
    observed = _Observed(ops)
    step = StepInputs(
        cast(Ops, observed),
        torch.arange(NUM_TOKENS),
        torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        kv.inputs([context]),
        text_lengths=torch.full((NUM_TOKENS,), NUM_TOKENS) if network.length_dependent else None,
    )
    network(torch.from_numpy(tokens), step)
    return observed.importance


class _Observed:
    """A back end whose linear layers are looked at."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.importance: dict[str, Tensor] = {}

    def linear(self, x: Tensor, packed: PackedLinear, *, lora: LoRAInputs | None = None) -> Tensor:
        squares = x.float().square().mean(0)  # [in]
        mean = squares.mean()
        if mean > 0 and mean.isfinite():
            self.importance |= dict.fromkeys((part.name for part in packed.slices), squares / mean + _LEAST)
        return self._ops.linear(x, packed, lora=lora)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return cast(Callable[..., Any], getattr(self._ops, name))
