"""The memory planner: chooses batch sizes, lengths and the size of the KV cache. Sizes are in bytes."""

from __future__ import annotations

from penstock.memory.demand import MAX_DRAFT_ROWS, requested_block_size
from penstock.memory.estimates import (
    encoder_cache_size,
    estimate_activation_memory,
    estimate_adapters_size,
    estimate_packed_size,
    estimate_weights_size,
)
from penstock.memory.plan import MemoryPlan, estimate_kv_cache_size, plan_memory
from penstock.memory.shares import rank_shares

__all__ = [
    "MAX_DRAFT_ROWS",
    "MemoryPlan",
    "encoder_cache_size",
    "estimate_activation_memory",
    "estimate_adapters_size",
    "estimate_kv_cache_size",
    "estimate_packed_size",
    "estimate_weights_size",
    "plan_memory",
    "rank_shares",
    "requested_block_size",
]
