"""A limit on the private memory of this process, beyond which allocations fail.

The limit is enforced by ``RLIMIT_DATA`` of Linux, which counts private writable mappings. These include files
that are mapped privately and writable, such as weights, although nothing writes to them. Therefore
``RLIMIT_DATA`` is set to the configured limit plus the size of these files.
"""

from __future__ import annotations

import errno
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import ConfigError, InsufficientMemoryError

_limit: int | None = None

_ALLOCATION_FAILURES = (
    "can't allocate memory",
    "Cannot allocate memory",
    "bad_alloc",
    "can't start new thread",
)
"""Parts of the messages of exceptions that report a failed allocation but are no MemoryError: exceptions of
torch, the dynamic loader and the start of threads."""


def limit() -> int | None:
    """Return the limit on private memory in bytes, or None without a limit."""
    return _limit


def set_limit(num_bytes: int) -> None:
    """Set the limit on the private memory of this process.

    Raises:
        ConfigError: the system is not Linux.
    """
    global _limit
    if not sys.platform.startswith("linux"):
        raise ConfigError("worker_memory_limit", "needs Linux: remove this setting")
    _limit = num_bytes
    exempt_mapped_files()


def free() -> int | None:
    """Return the free bytes below the limit, or None without a limit."""
    if _limit is None:
        return None
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return max(_limit - int(fields["VmData"].split()[0]) * 1024 + _mapped_bytes(), 0)


@contextmanager
def allow_mapping(num_bytes: int) -> Iterator[None]:
    """Increase ``RLIMIT_DATA`` by ``num_bytes`` in the block, so that the block can map a file of this size.

    Does nothing without a limit.
    """
    if _limit is None:
        yield
        return
    _set_rlimit(_limit + _mapped_bytes() + num_bytes)
    try:
        yield
    finally:
        exempt_mapped_files()


def exempt_mapped_files() -> None:
    """Set ``RLIMIT_DATA`` to the limit plus the current size of the privately mapped, writable files.

    Does nothing without a limit.
    """
    if _limit is not None:
        _set_rlimit(_limit + _mapped_bytes())


def is_exceeded(error: BaseException) -> bool:
    """Return whether a limit is set, and ``error`` or one of its causes reports a failed allocation."""
    cause: BaseException | None = error if _limit is not None else None
    while cause is not None:
        is_memory_error = isinstance(cause, MemoryError) or (
            isinstance(cause, OSError) and cause.errno == errno.ENOMEM
        )
        if is_memory_error or any(message in str(cause) for message in _ALLOCATION_FAILURES):
            return True
        cause = cause.__cause__
    return False


def limit_error_for_requests() -> InsufficientMemoryError:
    """Return the error for requests that were running when the limit was reached."""
    size = _limit or 0
    return InsufficientMemoryError(
        f"the worker has reached its limit of {size:,} bytes of private memory (--worker-memory-limit) "
        "and restarts: send a shorter request, or one with fewer choices, or raise the limit",
        needed=size,
        available=size,
    )


def limit_error_for_load() -> ConfigError:
    """Return the error for a load of a model that reached the limit."""
    size = f"{_limit or 0:,} bytes"
    return ConfigError(
        "worker_memory_limit", f"the model cannot be loaded within {size} of private memory: raise the limit"
    )


def _set_rlimit(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _mapped_bytes() -> int:
    """Return the total size of the files that are mapped privately and writable, in bytes."""
    size = 0
    # A line is like "7f00-7f10 rw-p 00000000 08:01 1234 /path".
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *_ = line.split(maxsplit=5)
        if access[1] == "w" and access[3] == "p" and inode != "0":
            start, end = addresses.split("-")
            size += int(end, 16) - int(start, 16)
    return size
