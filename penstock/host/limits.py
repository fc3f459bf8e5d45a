"""Limits of Linux control groups on this process: memory and CPU time of a container or a service.

``/proc/meminfo`` and the number of cores describe the whole machine, even inside a container. This module
reads control groups of versions 1 and 2. The limits of parent groups also apply to a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def memory() -> tuple[int, int] | None:
    """Return the lowest limit and the lowest free memory of all groups, in bytes; None without a limit.

    The file cache is charged to a group but is dropped when memory is short, so it counts as free.
    """
    limits, free = [], []
    for folder, version in _groups("memory"):
        names = ("memory.max", "memory.current") if version == 2 else _MEMORY_V1
        limit, used = (_number(folder / name) for name in names)
        if limit is not None and used is not None:
            limits.append(limit)
            free.append(max(limit - used + _file_cache(folder, "" if version == 2 else "total_"), 0))
    return (min(limits), min(free)) if limits else None


_MEMORY_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def cores() -> float | None:
    """Return the CPU limit of the process in cores; None without a limit."""
    limits = []
    for folder, version in _groups("cpu"):
        # Without a limit, the first word is "max" in version 2 and "-1" in version 1.
        if version == 2:
            words = (_text(folder / "cpu.max") or "").split()
        else:
            words = [_text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def _groups(controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folders of this process's group and of its parents, each with its version of control groups.

    In a container, the process's group is mounted at the root, although ``/proc/self/cgroup`` may name
    another path. A path with ``..`` is outside the mount, so only the root is used.
    """
    for line in (_text(_MEMBERSHIP) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            root_folder, version = _MOUNT / controller, 1
        elif not controllers:
            root_folder, version = _MOUNT, 2
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for count in range(len(parts) + 1) if ".." not in parts else [0]:
            yield root_folder.joinpath(*parts[:count]), version


def _file_cache(folder: Path, prefix: str) -> int:
    """Return the bytes of the page cache that are charged to a group, without shared memory."""
    counted_fields = (f"{prefix}inactive_file", f"{prefix}active_file")
    rows = (line.split() for line in (_text(folder / "memory.stat") or "").splitlines())
    return sum(int(value) for name, value in rows if name in counted_fields)


def _number(file: Path) -> int | None:
    text = _text(file) or ""
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None
