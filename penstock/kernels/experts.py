"""Experts: feed-forward layers of equal shape. Each row of a batch is routed to a few experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.collectives import Collectives
from penstock.kernels.linear import PackedLinear


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """The gate ``g * sigmoid(alpha * g) * (up + 1)``.

    ``g`` is clamped to at most ``limit``, and ``up`` to the range ``-limit..limit``.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedExperts:
    """The packed weights of N experts, for `Ops.experts`.

    Instances are compared by identity, so that a back end can cache data about them.
    """

    gate_up: tuple[PackedLinear, ...]  # N layers [E] -> [2F]: gates, then ups
    down: tuple[PackedLinear, ...]  # N layers [F] -> [E]
    first: int = 0
    """The id of the first expert, if ranks divide the experts. Experts with other ids are on other ranks."""
    is_part: bool = False
    """Whether some experts are on other ranks. Their outputs count as 0."""
    ranks: Collectives | None = None
    """The ranks that divide the experts; None if this rank has all experts.

    `Ops.experts` returns the sum over the experts of this rank. The caller adds the sums of all ranks.
    """

    def slice_names(self) -> Iterator[str]:
        """Yield the names of the experts' linear layers in the checkpoint."""
        return (part.name for linear in (*self.gate_up, *self.down) for part in linear.slices)


def grouped_by_expert(
    topk_ids: Tensor, experts: int, max_pairs: int, *, skip_other_ids: bool = False
) -> Iterator[tuple[Tensor, dict[int, int]]]:
    """Yield groups of the (row, expert) pairs of ``topk_ids [T, k]``, sorted by expert.

    Pair p is element p of the flattened ids. It belongs to row ``p // k``.

    Args:
        topk_ids: ids, distinct in each row. Without ``skip_other_ids``, they are in 0 to ``experts - 1``.
        experts: number of experts.
        max_pairs: maximum number of pairs per group.
        skip_other_ids: whether to skip ids outside 0 to ``experts - 1``, which are experts on other ranks.

    Yields:
        The pairs ``[P]`` of a group, and a mapping of each expert id to its number of pairs in the group.
        Expert ids ascend within and across groups. The pairs of an expert ascend, and may continue in the
        next group.
    """
    flat = topk_ids.flatten()
    order = flat.argsort(stable=True)
    if skip_other_ids:
        sorted_ids = flat[order]
        order = order[(sorted_ids >= 0) & (sorted_ids < experts)]
        flat = flat[(flat >= 0) & (flat < experts)]
    sizes: dict[int, int] = {}
    start = stop = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=experts).tolist()):
        while count:
            sizes[expert] = min(count, start + max_pairs - stop)
            stop, count = stop + sizes[expert], count - sizes[expert]
            if stop == start + max_pairs:
                yield order[start:stop], sizes
                sizes, start = {}, stop
    if sizes:
        yield order[start:stop], sizes
