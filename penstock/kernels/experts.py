"""The experts of mixture-of-experts layers: MLPs of equal shape. Each row uses a few of them."""

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

    Instances are compared by identity, so that back ends can cache data by instance.
    """

    gate_up: tuple[PackedLinear, ...]  # N layers [E] -> [2F]: gates, then ups
    down: tuple[PackedLinear, ...]  # N layers [F] -> [E]
    first_id: int = 0
    """The id of the first expert. The ids of the N experts are ``first_id`` to ``first_id + N - 1``."""
    is_part: bool = False
    """Whether other ranks have further experts. `Ops.experts` then skips ids of experts of other ranks."""
    ranks: Collectives | None = None
    """The ranks among which the experts are divided; None if this rank has all experts.

    `Ops.experts` returns the sum over the experts of this rank. The caller adds the sums of all ranks.
    """

    def slice_names(self) -> Iterator[str]:
        """Yield the checkpoint names of the slices of all layers (`LinearSlice.name`)."""
        return (part.name for linear in (*self.gate_up, *self.down) for part in linear.slices)


def grouped_by_expert(
    topk_ids: Tensor, num_experts: int, max_pairs: int, *, skip_other_ids: bool = False
) -> Iterator[tuple[Tensor, dict[int, int]]]:
    """Yield groups of the (row, expert) pairs of ``topk_ids [T, k]``, sorted by expert.

    Pair p is element p of the flattened ids. It belongs to row ``p // k``.

    Args:
        topk_ids: expert ids, distinct in each row. Without ``skip_other_ids``, they must be below
            ``num_experts`` and not negative.
        num_experts: number of experts.
        max_pairs: maximum number of pairs per group.
        skip_other_ids: whether to skip ids outside 0 to ``num_experts - 1``: experts of other ranks.

    Raises:
        IndexError: an id is invalid.

    Yields:
        The numbers of the pairs ``[P]`` of a group, and the number of pairs in the group by expert id. Expert
        ids ascend within and across groups. The pairs of an expert ascend, and may continue in the next
        group.
    """
    flat_ids = topk_ids.flatten()
    order = flat_ids.argsort(stable=True)
    if skip_other_ids:
        sorted_ids = flat_ids[order]
        order = order[(sorted_ids >= 0) & (sorted_ids < num_experts)]
        flat_ids = flat_ids[(flat_ids >= 0) & (flat_ids < num_experts)]
    elif len(invalid := flat_ids[(flat_ids < 0) | (flat_ids >= num_experts)]):
        raise IndexError(f"expert id {int(invalid[0])} is not in 0..{num_experts - 1}")
    pair_counts: dict[int, int] = {}
    start = stop = 0
    for expert, num_pairs in enumerate(torch.bincount(flat_ids, minlength=num_experts).tolist()):
        while num_pairs:
            pair_counts[expert] = min(num_pairs, start + max_pairs - stop)
            stop, num_pairs = stop + pair_counts[expert], num_pairs - pair_counts[expert]
            if stop == start + max_pairs:
                yield order[start:stop], pair_counts
                pair_counts, start = {}, stop
    if pair_counts:
        yield order[start:stop], pair_counts
