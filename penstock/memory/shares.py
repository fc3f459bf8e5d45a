"""`rank_shares`: the fraction of each matrix on a rank, for memory plans with tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable

from penstock.distributed import Shard
from penstock.nn import TensorNames


def rank_shares(names: TensorNames, shard: Shard, kv_heads: int) -> Callable[[str], float]:
    """Return a function that maps the name of a matrix to the largest fraction of the matrix on any rank.

    The embedding table, the output head and the matrices of the decoder's blocks are divided, except routers
    and `TensorNames.replicated`. Every rank has a whole copy of all other matrices, such as those of an image
    encoder.

    Args:
        names: the tensor names of the family.
        shard: the shard of one rank. All ranks give the same result.
        kv_heads: K, the number of kv heads of the model.
    """
    kv_share = shard.max_kv_heads(kv_heads) / kv_heads
    block_prefix = names.block.partition("{layer}")[0]

    def share(tensor: str) -> float:
        role = names.role(tensor)
        if role in ("table", "head"):
            is_divided = role == "head" or names.is_token_table(tensor)
            return 1 / shard.world_size if is_divided else 1.0
        if (
            role == "router"
            or names.is_replicated(tensor)
            or not tensor.removeprefix(names.prefix).startswith(block_prefix)
        ):
            return 1.0
        if f".{names.attention}." not in tensor:
            return 1 / shard.world_size
        parts = tensor.split(".")
        if parts[-2] in names.qkv[1:] or shard.world_size <= kv_heads:
            return kv_share
        return 1 / shard.world_size

    return share
