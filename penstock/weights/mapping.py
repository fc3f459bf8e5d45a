"""Memory-mapped files. The operating system reads a page on first access. `drop_pages` releases pages."""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import WeightsError
from penstock.host.memory import advise_huge_pages
from penstock.host.private_memory import allow_mapping


def map_file(file: Path) -> Tensor:
    """Map a file and return its bytes, ``[size]`` uint8. Writes to the tensor do not change the file.

    Raises:
        WeightsError: the file cannot be mapped.
    """
    try:
        size = file.stat().st_size
        with allow_mapping(size):
            return torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError) as problem:
        raise WeightsError(file, f"cannot be mapped: {problem}") from problem


def map_in_huge_pages(file: Path) -> Tensor:
    """Map a file, in huge pages if the page cache supports them, and return its bytes, ``[size]`` uint8.

    Used for weights that are read in every step. Huge pages avoid most TLB misses.

    Raises:
        WeightsError: the file cannot be mapped.
    """
    try:
        with file.open("rb") as stream, allow_mapping(file.stat().st_size):
            content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as problem:
        raise WeightsError(file, f"cannot be mapped: {problem}") from problem
    advise_huge_pages(content)
    return torch.frombuffer(content, dtype=torch.uint8)  # the tensor keeps the mapping


def read_in_huge_pages(file: Path) -> None:
    """Move a file that was just written to huge pages: drop its pages from the page cache and read it again.

    Writing fills the page cache with small pages, which would remain in use.
    """
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    content = map_in_huge_pages(file)
    content[:: mmap.PAGESIZE].max()  # accesses each page


def drop_pages(tensor: Tensor) -> None:
    """Drop the pages of a contiguous, unmodified tensor that is mapped from a file.

    Pages that also contain parts of other tensors are not dropped. Does nothing if the tensor is not mapped
    from a file, or on a system without ``madvise`` or ``/proc``. The next access reads the pages again, from
    the page cache or from the file. Without this function, a process that packs a model has both the packed
    and the stored weights in its resident memory until the file is closed.
    """
    page = mmap.PAGESIZE
    begin = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.nbytes) // page * page
    if end > begin and (advise := _madvise()) is not None and _is_file_backed(begin, end):
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def _is_file_backed(begin: int, end: int) -> bool:
    """Return whether these addresses are in one mapping of a file.

    Dropping pages of anonymous memory would lose their content.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return False
    for line in lines:  # "7f00-7f10 r--p 00000000 08:01 1234 /path"
        addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
        first, last = (int(address, 16) for address in addresses.split("-"))
        if first <= begin < last:
            return end <= last and inode != "0"
    return False


@cache
def _madvise() -> ctypes._NamedFuncPointer | None:
    """Return the C library's ``madvise``, or None on systems without it, such as Windows."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return None
    return ctypes.CDLL(None).madvise
