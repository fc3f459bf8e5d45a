"""Experts: feed-forward layers of one shape, of which each row of a batch visits a few."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.linear import PackedLinear


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """The gate ``g * sigmoid(alpha * g) * (up + 1)``, g at most ``limit``, up within ``limit`` of zero."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedExperts:
    """The weights of N experts, ready for `Ops.experts`: each linear is packed as any other.

    Known by identity: a back end may keep beside them what it found out about them.
    """

    gate_up: tuple[PackedLinear, ...]  # N of [E] -> [2F]: gates, then ups
    down: tuple[PackedLinear, ...]  # N of [F] -> [E]

    def slice_names(self) -> Iterator[str]:
        """The names that their linears have in the checkpoint."""
        return (part.name for linear in (*self.gate_up, *self.down) for part in linear.slices)


def grouped_by_expert(chosen: Tensor, experts: int, at_most: int) -> Iterator[tuple[Tensor, dict[int, int]]]:
    """The places of ``chosen [T, k]``, counted row by row, those that name one expert together.

    Args:
        chosen: numbers from 0 to ``experts`` - 1, in each row different ones.
        experts: how many there are.
        at_most: how many places to give at once.

    Yields:
        Places ``[P]``, place p of row ``p // k``; and of how many of them each expert is named, in order. An
        expert's places ascend, and so do the experts, over all that is given.
    """
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    sizes: dict[int, int] = {}
    start = stop = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=experts).tolist()):
        while count:
            sizes[expert] = min(count, start + at_most - stop)
            stop, count = stop + sizes[expert], count - sizes[expert]
            if stop == start + at_most:
                yield order[start:stop], sizes
                sizes, start = {}, stop
    if sizes:
        yield order[start:stop], sizes
