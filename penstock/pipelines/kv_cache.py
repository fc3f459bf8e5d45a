"""Re-exports `penstock.kv_cache`. Names are resolved on first use: importing this module loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.host.lazy_names import lazy_names

if TYPE_CHECKING:
    from penstock.kv_cache import (
        BlockPool,
        KVCache,
        KVCacheManager,
        KVCacheSpec,
        KVCacheStorage,
        KVGroup,
        NullKVCache,
        restart,
    )

__all__ = [
    "BlockPool",
    "KVCache",
    "KVCacheManager",
    "KVCacheSpec",
    "KVCacheStorage",
    "KVGroup",
    "NullKVCache",
    "restart",
]


if not TYPE_CHECKING:  # with __getattr__, type checkers would accept missing names
    __getattr__ = lazy_names(__name__, dict.fromkeys(__all__, "penstock.kv_cache"))
