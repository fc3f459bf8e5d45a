"""Memory for packed weights, in huge pages if the system has them.

A decode step reads every weight once. With pages of 4 KB this takes 1.5 times as long as with huge pages: the
processor translates a new address every 64 cache lines, and its prefetchers stop at the end of a page.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from penstock.host.memory import CACHE_LINE, PrefaultedMemory, huge_pages

_MIN_CHUNK_BYTES = 32 << 20
"""Minimum bytes that `WeightMemory` allocates at once."""


class WeightMemory:
    """Allocates tensors from prefaulted memory, or from its own chunks if the prefaulted memory is used up.

    The current chunk is kept. Any other chunk is freed with the last tensor in it.

    Args:
        prefaulted: memory that is prefaulted while a model loads.
    """

    def __init__(self, prefaulted: PrefaultedMemory | None = None) -> None:
        self._prefaulted = prefaulted or PrefaultedMemory()
        self._chunk = torch.empty(0, dtype=torch.uint8)  # the unused part of the current chunk

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor, aligned to a cache line."""
        num_bytes = prod(shape) * dtype.itemsize
        memory = self._prefaulted.allocate(num_bytes)
        if memory is not None:
            return torch.from_numpy(memory).view(dtype).view(shape)
        if num_bytes > len(self._chunk):
            self._chunk = torch.from_numpy(huge_pages(max(num_bytes, _MIN_CHUNK_BYTES)))
        tensor = self._chunk[:num_bytes].view(dtype).view(shape)
        self._chunk = self._chunk[-(-num_bytes // CACHE_LINE) * CACHE_LINE :]
        return tensor


class SliceMemory:
    """Memory for one packed slice of a weight at a time.

    Args:
        num_bytes: minimum bytes of an allocation. The memory grows for larger slices.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor, aligned to a cache line.

        The tensor may overlap the tensors that earlier calls returned.
        """
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes > len(self._memory):
            self._memory = torch.from_numpy(huge_pages(max(num_bytes, self.num_bytes)))
        return self._memory[:num_bytes].view(dtype).view(shape)
