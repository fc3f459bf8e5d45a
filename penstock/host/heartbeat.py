"""A progress counter of this process that another process can read.

Long-running code calls `beat` after each part of its work, such as a layer, a tensor that was read, or a
weight that was packed. The kernels increment the same counter. A worker answers no messages during a long
step, and none when it hangs. The supervisor distinguishes the two cases by this counter.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

_SIZE = ctypes.sizeof(ctypes.c_int64)


class ProgressFile:
    """The reader's side of a counter in a file. Another process publishes to the file and calls `beat`.

    Args:
        path: path of the file. The constructor creates it.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.write_bytes(bytes(_SIZE))
        with open(path, "rb") as file:
            self._pages = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)

    @property
    def count(self) -> int:
        """The current count."""
        return int.from_bytes(self._pages[:_SIZE], "little", signed=True)

    def close(self) -> None:
        """Remove the file."""
        self._pages.close()
        self._path.unlink(missing_ok=True)


_counter = ctypes.c_int64()


def publish(path: str) -> None:
    """Make `beat` count in the file of a `ProgressFile` from now on.

    Must be called before the kernel library is opened, because the library receives the counter's address
    only once.
    """
    global _counter
    with open(path, "r+b") as file:
        _counter = ctypes.c_int64.from_buffer(mmap.mmap(file.fileno(), _SIZE))


def beat() -> None:
    """Increment the counter of this process. A call takes 50 ns. Two concurrent calls may count as one."""
    _counter.value += 1


def counter_address() -> int:
    """Return the address of the counter in the memory of this process."""
    return ctypes.addressof(_counter)
