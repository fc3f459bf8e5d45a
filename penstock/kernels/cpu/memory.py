"""Memory for packed weights, in huge pages if the system has them.

A step reads every weight once. With pages of 4 KB this takes 1.5 times as long: the processor looks up a new
page every 64 cache lines, and its prefetchers stop at the end of a page.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from penstock.host.memory import CACHE_LINE, PrefaultedMemory, huge_pages

_CHUNK = 32 << 20


class WeightMemory:
    """Allocates tensors consecutively: first from prefaulted memory, then from chunks that it allocates.

    A chunk is freed with the last of its tensors.

    Args:
        prefaulted: the prefaulted memory of a load.
    """

    def __init__(self, prefaulted: PrefaultedMemory | None = None) -> None:
        self._prefaulted = prefaulted or PrefaultedMemory()
        self._chunk = torch.empty(0, dtype=torch.uint8)  # the part that is not allocated yet

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor, aligned to a cache line."""
        num_bytes = prod(shape) * dtype.itemsize
        found = self._prefaulted.allocate(num_bytes)
        if found is not None:
            return torch.from_numpy(found).view(dtype).view(shape)
        if num_bytes > len(self._chunk):
            self._chunk = torch.from_numpy(huge_pages(max(num_bytes, _CHUNK)))
        tensor = self._chunk[:num_bytes].view(dtype).view(shape)
        self._chunk = self._chunk[-(-num_bytes // CACHE_LINE) * CACHE_LINE :]
        return tensor


class SliceMemory:
    """Memory for one slice of a weight at a time. A slice fits in the processor's cache."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor, aligned to a cache line, in the memory of the previous one."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes > len(self._memory):
            self._memory = torch.from_numpy(huge_pages(max(num_bytes, self.num_bytes)))
        return self._memory[:num_bytes].view(dtype).view(shape)
