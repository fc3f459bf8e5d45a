"""The processors of this machine, and their division among worker processes or ranks."""

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
    """The ids of the processors that the threads of the process may use."""
    num_threads: int
    """The number of compute threads of the process."""

    def __str__(self) -> str:
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        return f"processors {format_processors(self.processors)}, {threads}"


def divide_processors(num_shares: int) -> tuple[ProcessorShare, ...]:
    """Divide the processors that this process may use into ``num_shares`` shares.

    The sizes of two shares differ by at most one processor. If these sizes permit, the processors of a share
    belong to one NUMA node, and the hardware threads of a core belong to one share. Shares are disjoint
    unless there are more shares than processors. In this case each share has one processor, and several
    shares have the same one. A CPU limit of the control group reduces the number of threads of a share, to at
    least 1, but not the number of its processors.
    """
    assert num_shares >= 1, f"{num_shares} shares"
    available_processors = _sort_by_distance(os.sched_getaffinity(0))
    cpu_limit = limits.cores()
    total_threads = (
        len(available_processors)
        if cpu_limit is None
        else min(len(available_processors), max(int(cpu_limit), 1))
    )
    thread_counts = [max(len(threads), 1) for threads in _split(range(total_threads), num_shares)]
    processor_groups = _split(available_processors, num_shares)
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
    """Return the processors of each NUMA node that has processors, by the number of the node.

    If the system reports no node with processors, returns a node 0 with the processors that this process may
    use.
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
    """Parse a list of processors in the notation of the Linux kernel.

    >>> parse_processors("0-2,8")
    (0, 1, 2, 8)
    """
    processors: list[int] = []
    for range_text in filter(None, text.split(",")):
        first, _, last = range_text.partition("-")
        processors += range(int(first), int(last or first) + 1)
    return tuple(processors)


def format_processors(processors: Iterable[int]) -> str:
    """Return a list of processors in the notation of the Linux kernel.

    >>> format_processors([0, 1, 2, 8])
    '0-2,8'
    """
    range_texts: list[str] = []
    remaining_processors = sorted(processors)
    while remaining_processors:
        first = last = remaining_processors.pop(0)
        while remaining_processors and remaining_processors[0] == last + 1:
            last = remaining_processors.pop(0)
        range_texts.append(str(first) if first == last else f"{first}-{last}")
    return ",".join(range_texts)


def _sort_by_distance(processors: Iterable[int]) -> list[int]:
    """Sort processors by NUMA node, then by core, so that neighbors in the list share a core or a node."""
    node_of = {processor: node for node, members in numa_nodes().items() for processor in members}
    return sorted(
        processors, key=lambda processor: (node_of.get(processor, 0), _core_id(processor), processor)
    )


def _core_id(processor: int) -> tuple[int, int]:
    """Return the ids of a processor's package and core, or (0, ``processor``) if the system reports none."""
    folder = _PROCESSORS / f"cpu{processor}" / "topology"
    try:
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text())
    except (OSError, ValueError):
        return 0, processor


def _split(items: Sequence[int], num_parts: int) -> list[Sequence[int]]:
    """Split a list into ``num_parts`` parts whose lengths differ by at most one; longer parts come first."""
    min_length, num_longer_parts = divmod(len(items), num_parts)
    boundaries = [index * min_length + min(index, num_longer_parts) for index in range(num_parts + 1)]
    return [items[start:end] for start, end in pairwise(boundaries)]
