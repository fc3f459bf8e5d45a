"""Memory for packed weights, in huge pages where the system has them.

A step reads every weight once. In pages of 4 KB that takes half as long again: the processor looks up a new
page every 64 lines, and its prefetchers stop there.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from penstock.host.memory import CACHE_LINE, allocate_prefaulted, huge_pages

_CHUNK = 32 << 20


class WeightMemory:
    """Hands out tensors, one behind the other: in what was found ahead for them while there is any, then in
    chunks of its own. Either goes with the last of its tensors."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)  # what is left of it

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, aligned to a cache line."""
        num_bytes = prod(shape) * dtype.itemsize
        found = allocate_prefaulted(num_bytes)
        if found is not None:
            return torch.from_numpy(found).view(dtype).view(shape)
        if num_bytes > len(self._chunk):
            self._chunk = torch.from_numpy(huge_pages(max(num_bytes, _CHUNK)))
        tensor = self._chunk[:num_bytes].view(dtype).view(shape)
        self._chunk = self._chunk[-(-num_bytes // CACHE_LINE) * CACHE_LINE :]
        return tensor


class SliceMemory:
    """Memory for a slice of a weight at a time, so little that it stays in the processor's cache."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, aligned to a cache line, in the place of the one before."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes > len(self._memory):
            self._memory = torch.from_numpy(huge_pages(max(num_bytes, self.num_bytes)))
        return self._memory[:num_bytes].view(dtype).view(shape)
