"""The placement of ranks on the processors of a host."""

from __future__ import annotations

import os

from penstock.host.processors import ProcessorShare, divide_processors, numa_nodes


def rank_processors(world: int) -> tuple[ProcessorShare, ...]:
    """Return the processors to which each rank is bound; empty on a machine with one NUMA node.

    Ranks are bound because memory of another node is slower. Within one node, ranks are faster without
    binding.
    """
    usable_processors = os.sched_getaffinity(0)
    num_nodes = sum(not usable_processors.isdisjoint(processors) for processors in numa_nodes().values())
    return divide_processors(world) if num_nodes > 1 else ()
