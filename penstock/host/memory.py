"""Host memory in huge pages, prefaulted memory for the packed weights of a load, and memory reservations.

The system allocates and clears a page on the first access to the page. If a virtual machine has returned free
memory to its host, the host must also allocate memory for the page, which takes many times as long. While the
imports of libraries use one core, `PrefaultedMemory` touches the memory for the packed weights on another
core.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Self, TypeAlias
from weakref import WeakSet

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes: TypeAlias = npt.NDArray[np.uint8]

_HUGE_PAGE = 2 << 20
CACHE_LINE = 64
"""Size of a cache line in bytes. An aligned vector load from an array that starts on a cache line reads only
one cache line."""
_MADV_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14 and later. Python's `mmap` does not define this constant."""
_PREFAULT_STEP = 16 << 20
"""Bytes that the thread of `PrefaultedBuffer` touches between two checks whether it must stop."""


def advise_huge_pages(pages: mmap.mmap) -> None:
    """Request huge pages for a mapping. Does nothing if the operating system does not support them."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)


def huge_pages(num_bytes: int) -> Bytes:
    """Return ``num_bytes`` bytes or more, starting on a huge page. The first write to a page allocates it."""
    pages, start = _map(num_bytes)
    return _view(pages)[start:]


def _map(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Return a mapping, and the offset in it from which ``num_bytes`` bytes or more start on a huge page."""
    rounded_size = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    pages = mmap.mmap(-1, rounded_size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge_pages(pages)
    return pages, -_view(pages).ctypes.data % _HUGE_PAGE


def _view(pages: mmap.mmap) -> Bytes:
    """Return the bytes of a mapping; the array keeps the mapping alive."""
    import numpy as np  # not at the top, because this module must be cheap to import

    return np.frombuffer(pages, np.uint8)


def discard_pages(address: int, num_bytes: int) -> None:
    """Fill a range of private memory with zeros.

    If the system supports it, pages that lie entirely in the range are returned to the system. The next write
    to a returned page allocates it again.
    """
    page = mmap.PAGESIZE
    begin, end = -(-address // page) * page, (address + num_bytes) // page * page
    if begin >= end or not hasattr(mmap, "MADV_DONTNEED"):
        ctypes.memset(address, 0, num_bytes)
        return
    ctypes.memset(address, 0, begin - address)
    ctypes.memset(end, 0, address + num_bytes - end)
    if not _advise(begin, end, mmap.MADV_DONTNEED):
        ctypes.memset(begin, 0, end - begin)  # madvise(2) fails for locked memory, for example


def populate_pages(address: int, num_bytes: int) -> bool:
    """Allocate the pages of a range of private memory and keep their contents.

    Later writes to these pages cause no page faults (madvise(2), MADV_POPULATE_WRITE).

    Returns:
        Whether the pages are allocated. False if the system lacks MADV_POPULATE_WRITE (Linux before 5.14,
        other systems) or has too little memory.
    """
    if sys.platform != "linux":
        return False
    page = mmap.PAGESIZE
    begin, end = address // page * page, -(-(address + num_bytes) // page) * page
    return _advise(begin, end, _MADV_POPULATE_WRITE)


def _advise(begin: int, end: int, advice: int) -> bool:
    """Call madvise(2) for the pages of an address range. Return whether the call succeeded."""
    failed: int = ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
    return not failed


class PrefaultedBuffer:
    """Memory that a thread prefaults page by page, until the first allocation from the buffer.

    An allocated part stays valid as long as it is referenced. `close` returns the other parts to the system.

    Args:
        num_bytes: size of the buffer, rounded up to huge pages.
    """

    def __init__(self, num_bytes: int) -> None:
        self._pages, self._start = _map(num_bytes)
        self._memory = _view(self._pages)[self._start :]
        self._num_touched = self._num_allocated = 0
        self._lock = threading.Lock()
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._touch, name="penstock-memory", daemon=True)
        self._thread.start()

    @property
    def num_idle(self) -> int:
        """Bytes that are prefaulted and not allocated."""
        return max(self._num_touched - self._num_allocated, 0)

    def allocate(self, num_bytes: int) -> Bytes | None:
        """Allocate the next ``num_bytes`` bytes, aligned to a cache line. Return None if fewer remain.

        The first call stops the prefaulting thread, so that the packing of weights can use all cores. The
        returned bytes may therefore be prefaulted only in part.
        """
        with self._lock:
            self._stop()
            start, end = self._num_allocated, self._num_allocated + num_bytes
            if end > len(self._memory):
                return None
            self._num_allocated = -(-end // CACHE_LINE) * CACHE_LINE
            return self._memory[start:end]

    def close(self) -> None:
        """Stop the thread and return unallocated memory to the system."""
        with self._lock:
            self._stop()
            begin = -(-(self._start + self._num_allocated) // mmap.PAGESIZE) * mmap.PAGESIZE
            if hasattr(mmap, "MADV_DONTNEED") and begin < len(self._pages):
                self._pages.madvise(mmap.MADV_DONTNEED, begin)
            self._num_allocated = len(self._memory)

    def _stop(self) -> None:
        self._is_stopped.set()
        self._thread.join()

    def _touch(self) -> None:
        for start in range(0, len(self._memory), _PREFAULT_STEP):
            if self._is_stopped.is_set():
                break
            end = min(start + _PREFAULT_STEP, len(self._memory))
            self._memory[start : end : mmap.PAGESIZE] = 0  # numpy releases the GIL during the assignment
            self._num_touched = end


class PrefaultedMemory:
    """The prefaulted memory for the packed weights of one load.

    At the end of a ``with`` block, unallocated memory is returned to the system.

    Args:
        num_bytes: size of the memory. With 0, or if the system refuses the mapping, nothing is prefaulted.
    """

    def __init__(self, num_bytes: int = 0) -> None:
        self._buffer: PrefaultedBuffer | None = None
        if num_bytes:
            with suppress(OSError):  # without the buffer, the load maps each packed weight separately
                self._buffer = PrefaultedBuffer(num_bytes)

    @property
    def num_idle(self) -> int:
        """Bytes that are prefaulted and not allocated. The planner of the load counts them as free."""
        return self._buffer.num_idle if self._buffer is not None else 0

    def allocate(self, num_bytes: int) -> Bytes | None:
        """Return ``num_bytes`` bytes, or None if fewer remain; see `PrefaultedBuffer.allocate`."""
        return self._buffer.allocate(num_bytes) if self._buffer is not None else None

    def release(self) -> None:
        """Return unallocated memory to the system; later allocations return None."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class MemoryReservation:
    """A number of bytes that the owner will allocate later; see `MemoryReservations.reserve`."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def end(self) -> None:
        """End the reservation: the memory has been allocated."""
        self.num_bytes = 0


class MemoryReservations:
    """The reservations of this process: memory that will be allocated later and does not count as free.

    A reservation ends when its owner ends it or is garbage-collected.
    """

    def __init__(self) -> None:
        self._reservations: WeakSet[MemoryReservation] = WeakSet()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Total bytes of the reservations that have not ended."""
        with self._lock:
            return sum(reservation.num_bytes for reservation in self._reservations)

    def reserve(self, num_bytes: int) -> MemoryReservation:
        """Reserve memory until the caller ends the returned reservation or no longer references it."""
        reservation = MemoryReservation(num_bytes)
        with self._lock:
            self._reservations.add(reservation)
        return reservation
