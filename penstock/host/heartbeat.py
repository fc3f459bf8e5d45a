"""The progress of this process, counted where another process can read it.

Code that may take long calls `beat` after each part of its work: a layer, a tensor that was read, a weight
that was packed. The kernels count their pieces in the same place. This tells a process that works from one
that hangs inside a step, although neither answers.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

_SIZE = ctypes.sizeof(ctypes.c_int64)


class ProgressFile:
    """A count in a file, which the process that makes progress increases and another one reads.

    Args:
        path: where the file is made.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.write_bytes(bytes(_SIZE))
        with open(path, "rb") as file:
            self._pages = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)

    @property
    def count(self) -> int:
        """The count as it is now."""
        return int.from_bytes(self._pages[:_SIZE], "little", signed=True)

    def close(self) -> None:
        """Remove the file."""
        self._pages.close()
        self._path.unlink(missing_ok=True)


_counter = ctypes.c_int64()


def publish(path: str) -> None:
    """Count the progress of this process in a `ProgressFile` from now on.

    Comes before the kernels are opened, which learn the counter's address once.
    """
    global _counter
    with open(path, "r+b") as file:
        _counter = ctypes.c_int64.from_buffer(mmap.mmap(file.fileno(), _SIZE))


def beat() -> None:
    """Count some progress. Takes some 50 ns. Two threads at once may count one."""
    _counter.value += 1


def counter_address() -> int:
    """Return where the counter is in the memory of this process."""
    return ctypes.addressof(_counter)
