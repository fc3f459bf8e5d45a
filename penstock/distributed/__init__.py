"""Tensor and expert parallelism: divides layers among ranks, and exchanges tensors among ranks.

`Shard` has the sharding rules. `Ranks` has the collectives, on torch.distributed or in shared memory.
`RankProcesses` starts and monitors the processes of the ranks from 1 on.
"""

from __future__ import annotations

from penstock.distributed.shard import AttentionPart, Part, Shard

__all__ = ["AttentionPart", "Part", "Shard"]
