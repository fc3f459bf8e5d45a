"""Memory for packed weights, in huge pages where the system has them.

A step reads every weight once. In pages of 4 KB that takes half as long again: the processor looks up a new
page every 64 lines, and its prefetchers stop there.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

_HUGE = 2 << 20
_CHUNK = 32 << 20
_LINE = 64


def advise_huge_pages(pages: mmap.mmap) -> None:
    """Asks for huge pages; a system built without them says no, which changes nothing but speed."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)


class WeightMemory:
    """Hands out tensors, one behind the other in chunks of memory; a chunk goes with its last tensor."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)  # what is left of it

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, aligned to a cache line."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes > len(self._chunk):
            self._chunk = _huge_pages(max(num_bytes, _CHUNK))
        tensor = self._chunk[:num_bytes].view(dtype).view(shape)
        self._chunk = self._chunk[-(-num_bytes // _LINE) * _LINE :]
        return tensor


def _huge_pages(num_bytes: int) -> Tensor:
    """At least so many bytes, from the start of a huge page; memory is taken when it is written."""
    rounded = -(-num_bytes // _HUGE) * _HUGE
    pages = mmap.mmap(-1, rounded + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge_pages(pages)
    whole = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the mapping
    start = -whole.data_ptr() % _HUGE
    return whole[start : start + rounded]
