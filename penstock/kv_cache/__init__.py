"""The paged KV cache: block tables, the prefix index, and the tensors.

Schedulers import only `interface` and `reservation`. Importing this package does not import torch. The
modules `manager` and `storage` import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.host.lazy_names import lazy_names
from penstock.kv_cache.block_pool import BlockPool
from penstock.kv_cache.interface import KVCache, NullKVCache, restart
from penstock.kv_cache.reservation import ReservedBatch, claim, reserve_drafts, reserve_steps, tokens_left
from penstock.kv_cache.spec import KVCacheSpec, KVGroup, StateSpec

if TYPE_CHECKING:
    from penstock.kv_cache.manager import KVCacheManager
    from penstock.kv_cache.storage import KVCacheStorage

__all__ = [
    "BlockPool",
    "KVCache",
    "KVCacheManager",
    "KVCacheSpec",
    "KVCacheStorage",
    "KVGroup",
    "NullKVCache",
    "ReservedBatch",
    "StateSpec",
    "claim",
    "reserve_drafts",
    "reserve_steps",
    "restart",
    "tokens_left",
]

_LAZY_MODULES = {
    "KVCacheManager": "penstock.kv_cache.manager",
    "KVCacheStorage": "penstock.kv_cache.storage",
}


if not TYPE_CHECKING:  # type checkers must report unknown names
    __getattr__ = lazy_names(__name__, _LAZY_MODULES)
