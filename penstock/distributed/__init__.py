"""Tensor and expert parallelism: the parts of a model on each rank, and the exchange of tensors among ranks.

`Shard` has the sharding rules. `Ranks` has the collectives, on torch.distributed or in shared memory.
`RankProcesses` starts and watches the processes of the other ranks.
"""

from __future__ import annotations

from penstock.distributed.shard import AttentionPart, Part, Shard

__all__ = ["AttentionPart", "Part", "Shard"]
