"""The NUMA nodes of this machine."""

from __future__ import annotations

from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def numa_nodes(folder: Path = _NODES) -> list[tuple[int, ...]]:
    """Return the processors of each NUMA node that has any; empty if the system does not tell."""
    found = []
    for node in sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            cores = parse_cores((node / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cores:
            found.append(cores)
    return found


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as ``0-3,8``.

    >>> parse_cores("0-3,8")
    (0, 1, 2, 3, 8)
    """
    cores: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores += range(int(first), int(last or first) + 1)
    return tuple(cores)
