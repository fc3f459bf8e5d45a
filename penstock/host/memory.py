"""Host memory in huge pages, and memory that a thread prefaults before a load needs it.

The system allocates and clears a page on its first access. In a virtual machine that has returned its free
memory, the host must allocate it again, which takes many times as long. While a load waits for library
imports, one core is idle: `prefaulted_memory` uses it to touch the memory for the packed weights.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakSet

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes: TypeAlias = npt.NDArray[np.uint8]

_HUGE_PAGE = 2 << 20
CACHE_LINE = 64
"""Bytes. What begins with one has no load of a kernel that crosses two."""
_PREFAULT_STEP = 16 << 20
"""Bytes to prefault per step; bounds how long the first allocation waits."""


def advise_huge_pages(pages: mmap.mmap) -> None:
    """Ask for huge pages. A kernel without them refuses, which only costs speed."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)


def huge_pages(num_bytes: int) -> Bytes:
    """Return at least ``num_bytes`` bytes that start on a huge page; pages are allocated on first write."""
    pages, start = _map(num_bytes)
    return _view(pages)[start:]


def _map(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Return a mapping and the offset of its first huge page, which at least ``num_bytes`` bytes follow."""
    rounded = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    pages = mmap.mmap(-1, rounded + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge_pages(pages)
    return pages, -_view(pages).ctypes.data % _HUGE_PAGE


def _view(pages: mmap.mmap) -> Bytes:
    """Return the bytes of a mapping; the array keeps the mapping alive."""
    import numpy as np  # late: this module is imported to ask how much memory there is

    return np.frombuffer(pages, np.uint8)


class PrefaultedBuffer:
    """Memory that a thread touches page by page until the first allocation from it.

    Allocated parts stay with their owner. `close` returns the rest to the system.

    Args:
        num_bytes: size of the buffer.
    """

    def __init__(self, num_bytes: int) -> None:
        self._pages, self._start = _map(num_bytes)
        self._memory = _view(self._pages)[self._start :]
        self._num_found = self._num_taken = 0
        self._taking = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._find, name="penstock-memory", daemon=True)
        self._thread.start()

    @property
    def num_idle(self) -> int:
        """Bytes that are prefaulted and not allocated."""
        return max(self._num_found - self._num_taken, 0)

    def take(self, num_bytes: int) -> Bytes | None:
        """Return the next ``num_bytes`` bytes, aligned to a cache line, or None if fewer are left.

        Stops the thread, so that packing has all cores.
        """
        with self._taking:
            self._end()
            start, end = self._num_taken, self._num_taken + num_bytes
            if end > len(self._memory):
                return None
            self._num_taken = -(-end // CACHE_LINE) * CACHE_LINE
            return self._memory[start:end]

    def close(self) -> None:
        """Stop the thread and return unallocated memory to the system."""
        with self._taking:
            self._end()
            begin = -(-(self._start + self._num_taken) // mmap.PAGESIZE) * mmap.PAGESIZE
            if hasattr(mmap, "MADV_DONTNEED") and begin < len(self._pages):
                self._pages.madvise(mmap.MADV_DONTNEED, begin)
            self._num_taken = len(self._memory)

    def _end(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _find(self) -> None:
        for start in range(0, len(self._memory), _PREFAULT_STEP):
            if self._is_over.is_set():
                break
            end = min(start + _PREFAULT_STEP, len(self._memory))
            self._memory[start : end : mmap.PAGESIZE] = 0  # numpy lets others run meanwhile
            self._num_found = end


_prefaulted: PrefaultedBuffer | None = None
"""The buffer of the current load. Only the first of several concurrent loads has one."""


@contextmanager
def prefaulted_memory(num_bytes: int) -> Iterator[None]:
    """Prefault ``num_bytes`` bytes for the duration of a load; `allocate_prefaulted` allocates from them.

    Unallocated memory is returned at the end of the block, or earlier by `release_prefaulted`.
    """
    global _prefaulted
    mine = None
    if _prefaulted is None and num_bytes:
        with suppress(OSError):  # one large mapping was refused; smaller ones may succeed later
            _prefaulted = mine = PrefaultedBuffer(num_bytes)
    try:
        yield
    finally:
        if mine is not None and _prefaulted is mine:
            release_prefaulted()


def allocate_prefaulted(num_bytes: int) -> Bytes | None:
    """Return ``num_bytes`` prefaulted bytes, or None if there is no buffer or too little is left."""
    ahead = _prefaulted
    return ahead.take(num_bytes) if ahead is not None else None


def release_prefaulted() -> None:
    """Return prefaulted memory that is not allocated to the system."""
    global _prefaulted
    ahead, _prefaulted = _prefaulted, None
    if ahead is not None:
        ahead.close()


def num_prefaulted() -> int:
    """Return the number of prefaulted bytes that are not allocated; they count as free memory."""
    ahead = _prefaulted
    return ahead.num_idle if ahead is not None else 0


class MemoryReservation:
    """Memory that will be allocated later and is not counted as free until then.

    Args:
        num_bytes: size of the reservation.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        with _reservations_lock:
            _reservations.add(self)

    def keep(self) -> None:
        """End the reservation: the memory has been allocated."""
        with _reservations_lock:
            _reservations.discard(self)


_reservations: WeakSet[MemoryReservation] = WeakSet()
_reservations_lock = threading.Lock()


def num_reserved() -> int:
    """Return the bytes of this process's free memory that are reserved."""
    with _reservations_lock:
        return sum(promise.num_bytes for promise in _reservations)
