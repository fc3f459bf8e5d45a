"""Limits of Linux control groups (cgroups) on this process: memory and CPU time of a container or a service.

``/proc/meminfo`` and the number of cores describe the whole machine, even inside a container. This module
reads control groups of versions 1 and 2. A group is also subject to the limits of its parent groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def memory() -> tuple[int, int] | None:
    """Return the lowest limit and the lowest free memory of all groups, in bytes; None without a limit.

    The file cache is charged to a group, but counts as free, because the system drops it when memory is
    short.
    """
    limits, free_sizes = [], []
    for folder, version in _groups("memory"):
        names = ("memory.max", "memory.current") if version == 2 else _MEMORY_FILES_V1
        limit, used = (_read_int(folder / name) for name in names)
        if limit is not None and used is not None:
            limits.append(limit)
            free_sizes.append(max(limit - used + _file_cache(folder, "" if version == 2 else "total_"), 0))
    return (min(limits), min(free_sizes)) if limits else None


_MEMORY_FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def cores() -> float | None:
    """Return the lowest CPU limit of all groups, in cores; None without a limit."""
    limits = []
    for folder, version in _groups("cpu"):
        # Without a limit, the first word is "max" in version 2 and "-1" in version 1.
        if version == 2:
            words = (_read_text(folder / "cpu.max") or "").split()
        else:
            words = [_read_text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def _groups(controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folder and the cgroup version (1 or 2) of this process's group and of each parent group.

    In a container, the process's group is mounted at the root, although ``/proc/self/cgroup`` may name
    another path. A path with ``..`` is outside the mount. For such a path, only the root is yielded.
    """
    for line in (_read_text(_MEMBERSHIP) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            root_folder, version = _MOUNT / controller, 1
        elif not controllers:
            root_folder, version = _MOUNT, 2
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1) if ".." not in parts else [0]:
            yield root_folder.joinpath(*parts[:depth]), version


def _file_cache(folder: Path, prefix: str) -> int:
    """Return the bytes of the page cache that are charged to a group, without shared memory."""
    counted_fields = (f"{prefix}inactive_file", f"{prefix}active_file")
    fields = (line.split() for line in (_read_text(folder / "memory.stat") or "").splitlines())
    return sum(int(value) for name, value in fields if name in counted_fields)


def _read_int(file: Path) -> int | None:
    text = _read_text(file) or ""
    return int(text) if text.isdigit() else None


def _read_text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None
