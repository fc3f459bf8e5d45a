"""The share of each tensor on a rank, for the memory plan of tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable

from penstock.distributed import Shard
from penstock.nn import TensorNames


def shares_of_rank(names: TensorNames, shard: Shard, kv_heads: int) -> Callable[[str], float]:
    """Return a function from the name of a matrix to the largest share on any rank.

    Matrices outside the decoder's blocks, such as those of an image encoder, count as whole on each rank.

    Args:
        names: the tensor names of the family.
        shard: a rank.
        kv_heads: K, the number of kv heads of the model.
    """
    of_heads = shard.max_kv_heads(kv_heads) / kv_heads
    head = names.block.partition("{layer}")[0]

    def share(tensor: str) -> float:
        role = names.role(tensor)
        if role in ("table", "head"):
            is_divided = role == "head" or names.is_embedding(tensor)
            return 1 / shard.world if is_divided else 1.0
        if role == "router" or not tensor.removeprefix(names.prefix).startswith(head):
            return 1.0
        if f".{names.attention}." not in tensor:
            return 1 / shard.world
        parts = tensor.split(".")
        if parts[-2] in names.qkv[1:] or shard.world <= kv_heads:
            return of_heads
        return 1 / shard.world

    return share
