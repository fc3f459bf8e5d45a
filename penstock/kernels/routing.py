"""The operations of mixture-of-experts routers, which select and weight the experts of each row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from penstock.kernels.operations import CFunction, operation


@dataclass(frozen=True, slots=True)
class ScoreRouting:
    """Routing by a score of each expert. A bias affects which experts are selected, but not their weights.

    Wang et al. 2024 (arXiv:2408.15664). Groups and `scale` are those of DeepSeek-V3 (arXiv:2412.19437).
    """

    scores: Literal["softmax", "sigmoid"]
    """The score function: softmax over all logits of a row, or sigmoid of each logit."""
    is_normed: bool
    """Whether the scores of the selected experts are divided by their sum."""
    scale: float = 1.0
    """Factor by which the weights are multiplied at the end."""
    num_groups: int = 1
    """Number of groups of consecutive experts. Each row selects groups first, then experts in the selected
    groups."""
    num_top_groups: int = 1
    """Number of groups to select. Groups are ranked by the sum of their two largest biased scores."""
    min_sum: float = 1e-20
    """Lower bound of the divisor of the normalized weights."""


@dataclass(frozen=True, slots=True)
class SparseMixer:
    """Routing of Phi-3.5-MoE (Abdin et al. 2024, arXiv:2404.14219; Liu et al. 2023, arXiv:2310.00811).

    Experts are selected one by one, by descending logit. The weight of a selected expert is its softmax over
    the experts that were not selected before it and whose logits are near: ``(largest - logit) /
    max(abs(logit), largest) <= 2 * eps``. ``largest`` is the logit of the selected expert.
    """

    eps: float


Routing = Literal["all", "all_normed", "chosen"] | ScoreRouting | SparseMixer
"""How a router weights the selected experts.

``all``: softmax over all experts. ``all_normed``: as ``all``, but divided by the sum of the selected experts'
weights. ``chosen``: softmax over the selected experts. `ScoreRouting` and `SparseMixer` describe the other
rules."""


class RoutingOps(ABC):
    """Operations that select and weight experts, scale rows, and convert rows to float32."""

    @operation(
        weights=["bias"],
        functions={
            "route": CFunction("2q 3P 4q"),
            "route_scores": CFunction("q 4P 8q 2d"),
            "route_sparse_mixer": CFunction("q 3P 4q d"),
        },
    )
    @abstractmethod
    def route(
        self,
        logits: Tensor,  # [T, N]
        top_k: int,
        routing: Routing,
        bias: Tensor | None = None,  # [N] float32
    ) -> tuple[Tensor, Tensor]:  # [T, top_k] float32, [T, top_k] int64
        """Return weights and ids of the ``top_k`` selected experts of each row.

        `Routing` describes the rules. ``all``, ``all_normed`` and ``chosen`` select the experts with the
        largest logits. A NaN ranks as -inf. Only `ScoreRouting` supports a ``bias``.
        """

    @operation(functions={"scale_rows": CFunction("2q 3P 5q")})
    @abstractmethod
    def scale_rows(self, x: Tensor, factors: Tensor, *, are_logits: bool = False) -> Tensor:
        """Return ``x * factors``, or with ``are_logits`` ``x * sigmoid(factors)``.

        ``x`` is ``[T, F]``, ``factors`` is ``[T, 1]``. Computed in float32, returned in x's type.
        """

    @operation(functions={"widen": CFunction("q 2P 3q")})
    @abstractmethod
    def widen(self, x: Tensor) -> Tensor:
        """Return ``x [T, F]`` in float32."""
