"""Where ranks run on a CPU: their processors and NUMA nodes."""

from __future__ import annotations

import os

from penstock.host.cores import numa_nodes


def cores_of_ranks(world: int) -> tuple[tuple[int, ...], ...]:
    """Return the processors that each rank is bound to; empty on a machine with one NUMA node.

    Each rank runs on one node, and ranks of the same node divide its processors. There is no binding if a
    node would have more ranks than processors, or if the nodes cannot have the same number of ranks.
    """
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    nodes = [tuple(sorted(set(cores) & usable)) for cores in numa_nodes()]
    nodes = [cores for cores in nodes if cores]
    if len(nodes) < 2:
        return ()
    if world < len(nodes):
        nodes = nodes[:world]
    if world % len(nodes):
        return ()
    share = world // len(nodes)
    if any(len(cores) < share for cores in nodes):
        return ()
    return tuple(
        cores[len(cores) * part // share : len(cores) * (part + 1) // share]
        for cores in nodes
        for part in range(share)
    )
