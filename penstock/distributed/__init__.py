"""Tensor and expert parallelism: the division of layers among ranks, and the collectives of the ranks.

`Shard` has the sharding rules. `Ranks` has the collectives, on torch.distributed or in shared memory.
`RankProcesses` starts and monitors the processes of all ranks except rank 0.
"""

from __future__ import annotations

from penstock.distributed.shard import AttentionPart, Part, Shard

__all__ = ["AttentionPart", "Part", "Shard"]
