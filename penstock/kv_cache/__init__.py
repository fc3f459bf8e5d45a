"""The paged KV cache: who holds which block, which prefixes are known, and the tensors themselves.

`interface` is all that a scheduler needs; nothing here loads torch before the manager or the storage is
asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from penstock.kv_cache.block_pool import BlockPool
from penstock.kv_cache.interface import KVCache, NullKVCache, restart
from penstock.kv_cache.reservation import ReservedBatch, claim, reserve_drafts, reserve_steps, tokens_left
from penstock.kv_cache.spec import KVCacheSpec, KVGroup

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
    "claim",
    "reserve_drafts",
    "reserve_steps",
    "restart",
    "tokens_left",
]

_LAZY = {
    "KVCacheManager": "penstock.kv_cache.manager",
    "KVCacheStorage": "penstock.kv_cache.storage",
}


if not TYPE_CHECKING:  # who checks types is to notice names that are not there

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_LAZY[name]), name)
