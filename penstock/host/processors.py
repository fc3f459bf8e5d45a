"""The processors of this machine, and their division among worker processes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from penstock.host import limits

_NODES = Path("/sys/devices/system/node")
_PROCESSORS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class ProcessorShare:
    """The processors of one process."""

    processors: tuple[int, ...]
    """The ids of the processors that its threads may use."""
    num_threads: int
    """The number of its compute threads."""

    def __str__(self) -> str:
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        return f"processors {format_processors(self.processors)}, {threads}"


def divide_processors(count: int) -> tuple[ProcessorShare, ...]:
    """Divide the processors that this process may use into ``count`` shares.

    Shares are disjoint, and their sizes differ by at most one processor. As far as the numbers allow, the
    processors of a share belong to one NUMA node, and the hardware threads of a core are in the same share.
    With more shares than processors, each share has one processor, and several shares have the same one. A
    CPU limit of the control group reduces the number of threads, to at least 1 per share, not the number of
    processors.
    """
    assert count >= 1, f"{count} shares"
    available_processors = _sort_by_distance(os.sched_getaffinity(0))
    cpu_limit = limits.cores()
    num_threads = (
        len(available_processors)
        if cpu_limit is None
        else min(len(available_processors), max(int(cpu_limit), 1))
    )
    thread_counts = [max(len(numbers), 1) for numbers in _split(range(num_threads), count)]
    processor_groups = _split(available_processors, count)
    return tuple(
        ProcessorShare(
            tuple(processors) or (available_processors[index % len(available_processors)],), num_threads
        )
        for index, (processors, num_threads) in enumerate(zip(processor_groups, thread_counts, strict=True))
    )


def pin(processors: Iterable[int]) -> None:
    """Restrict the calling thread, and the threads that it starts later, to ``processors``."""
    os.sched_setaffinity(0, processors)


def numa_nodes() -> dict[int, tuple[int, ...]]:
    """Return the processors of each NUMA node that has processors.

    If the system reports no such node, returns a node 0 with the processors that this process may use.
    """
    nodes = {}
    for folder in _NODES.glob("node[0-9]*"):
        try:
            nodes[int(folder.name.removeprefix("node"))] = parse_processors(
                (folder / "cpulist").read_text().strip()
            )
        except OSError:
            continue
    nodes_with_processors = {node: processors for node, processors in sorted(nodes.items()) if processors}
    return nodes_with_processors or {0: tuple(sorted(os.sched_getaffinity(0)))}


def parse_processors(text: str) -> tuple[int, ...]:
    """Parse a list of processors in the kernel's notation.

    >>> parse_processors("0-2,8")
    (0, 1, 2, 8)
    """
    processors: list[int] = []
    for range_text in filter(None, text.split(",")):
        first, _, last = range_text.partition("-")
        processors += range(int(first), int(last or first) + 1)
    return tuple(processors)


def format_processors(processors: Iterable[int]) -> str:
    """Return a list of processors in the kernel's notation.

    >>> format_processors([0, 1, 2, 8])
    '0-2,8'
    """
    parts: list[str] = []
    numbers = sorted(processors)
    while numbers:
        first = last = numbers.pop(0)
        while numbers and numbers[0] == last + 1:
            last = numbers.pop(0)
        parts.append(str(first) if first == last else f"{first}-{last}")
    return ",".join(parts)


def _sort_by_distance(processors: Iterable[int]) -> list[int]:
    """Sort processors by NUMA node, then by core, so that adjacent processors in the list are close."""
    node_of = {number: node for node, numbers in numa_nodes().items() for number in numbers}
    return sorted(processors, key=lambda number: (node_of.get(number, 0), _core_id(number), number))


def _core_id(processor: int) -> tuple[int, int]:
    """Return (package, core) of a processor, or (0, its own id) if the system does not report them."""
    folder = _PROCESSORS / f"cpu{processor}" / "topology"
    try:
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text())
    except (OSError, ValueError):
        return 0, processor


def _split(items: Sequence[int], count: int) -> list[Sequence[int]]:
    """Split a list into ``count`` parts whose lengths differ by at most one; longer parts come first."""
    size, num_longer = divmod(len(items), count)
    starts = [index * size + min(index, num_longer) for index in range(count + 1)]
    return [items[start:end] for start, end in pairwise(starts)]
