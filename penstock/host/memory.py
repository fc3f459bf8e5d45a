"""The host's memory: in huge pages, and found before it is needed.

Pages come into being when they are first touched. The system clears them then, and in a virtual machine that
gave its free memory back the host has to find them first, which takes many times as long. A load that waits
for libraries to be imported has a core to spare: `prefaulted_memory` has a thread touch the memory meanwhile that
the weights will be packed into.
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
"""Bytes that are found at a go: whoever takes the first of them waits so long."""


def advise_huge_pages(pages: mmap.mmap) -> None:
    """Asks for huge pages; a system built without them says no, which changes nothing but speed."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)


def huge_pages(num_bytes: int) -> Bytes:
    """At least so many bytes, from the start of a huge page; memory is taken when it is written."""
    pages, start = _map(num_bytes)
    return _view(pages)[start:]


def _map(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Pages, and where in them the first huge one begins, which so many bytes follow at least."""
    rounded = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    pages = mmap.mmap(-1, rounded + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge_pages(pages)
    return pages, -_view(pages).ctypes.data % _HUGE_PAGE


def _view(pages: mmap.mmap) -> Bytes:
    """The bytes of a mapping, which they keep."""
    import numpy as np  # late: this module is imported to ask how much memory there is

    return np.frombuffer(pages, np.uint8)


class PrefaultedBuffer:
    """Memory that a thread finds, page after page, until somebody takes of it.

    What is taken stays with whoever has it; the rest goes back with `close`.

    Args:
        num_bytes: how much there is to be.
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
        """Bytes that have been found and not been taken."""
        return max(self._num_found - self._num_taken, 0)

    def take(self, num_bytes: int) -> Bytes | None:
        """The next so many bytes, from the start of a cache line; None where fewer are left.

        The search ends: those who write are to have all cores.
        """
        with self._taking:
            self._end()
            start, end = self._num_taken, self._num_taken + num_bytes
            if end > len(self._memory):
                return None
            self._num_taken = -(-end // CACHE_LINE) * CACHE_LINE
            return self._memory[start:end]

    def close(self) -> None:
        """Ends the search, and gives back what nobody has taken."""
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
"""That of the load which is under way; of several at once, the first one's."""


@contextmanager
def prefaulted_memory(num_bytes: int) -> Iterator[None]:
    """For the time of a load: finds so much memory, for `allocate_prefaulted` to hand out.

    At its end, or with `release_prefaulted` before it, what nobody has taken goes back.
    """
    global _prefaulted
    mine = None
    if _prefaulted is None and num_bytes:
        with suppress(OSError):  # so much at once is refused: it may be had in parts
            _prefaulted = mine = PrefaultedBuffer(num_bytes)
    try:
        yield
    finally:
        if mine is not None and _prefaulted is mine:
            release_prefaulted()


def allocate_prefaulted(num_bytes: int) -> Bytes | None:
    """So many bytes of what was found ahead; None where there is nothing of the kind, or not enough left."""
    ahead = _prefaulted
    return ahead.take(num_bytes) if ahead is not None else None


def release_prefaulted() -> None:
    """Gives back what was found ahead and not taken: nobody is going to."""
    global _prefaulted
    ahead, _prefaulted = _prefaulted, None
    if ahead is not None:
        ahead.close()


def num_prefaulted() -> int:
    """Bytes that were found ahead and that nobody has taken yet: they count as free."""
    ahead = _prefaulted
    return ahead.num_idle if ahead is not None else 0


class MemoryReservation:
    """Memory that somebody is going to take, and that nobody else should count on; until it is kept, or
    dropped.

    Args:
        num_bytes: how much.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        with _reservations_lock:
            _reservations.add(self)

    def keep(self) -> None:
        """It has been taken."""
        with _reservations_lock:
            _reservations.discard(self)


_reservations: WeakSet[MemoryReservation] = WeakSet()
_reservations_lock = threading.Lock()


def num_reserved() -> int:
    """Bytes of this process's free memory that somebody is going to take."""
    with _reservations_lock:
        return sum(promise.num_bytes for promise in _reservations)
