"""The placement of ranks on the processors of a host."""

from __future__ import annotations

import os

from penstock.host.processors import ProcessorShare, divide_processors, numa_nodes


def rank_processors(world_size: int) -> tuple[ProcessorShare, ...]:
    """Return the processors to which each rank is bound, or () if all usable processors are on one NUMA node.

    Binding keeps a rank near its memory: access to the memory of another NUMA node is slower. On one NUMA
    node, ranks are faster without binding.
    """
    usable_processors = os.sched_getaffinity(0)
    num_nodes = sum(not usable_processors.isdisjoint(processors) for processors in numa_nodes().values())
    return divide_processors(world_size) if num_nodes > 1 else ()
