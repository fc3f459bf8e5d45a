"""`CachePrefault`: allocates pages of the KV cache before a step writes to them.

The system allocates and clears a page of the cache on the first write to the page. For a small model, this
takes several percent of the time of a prefill. An idle worker therefore allocates the pages of the blocks
that are used next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.kv_cache.block_pool import BlockPool
from penstock.kv_cache.spec import KVCacheSpec
from penstock.kv_cache.storage import KVCacheStorage

PREFAULT_BYTES = 32 << 20
"""Bytes of never used blocks, over all layers, whose pages are allocated in advance.

With huge pages, the system allocates up to 4 MiB more for each layer, and up to 8 MiB more for a layer with
row scales.
"""


class CachePrefault:
    """Allocates the pages of the next never used blocks: `PREFAULT_BYTES`, or one block if it is larger.

    Does nothing for a cache in the memory of a GPU.

    Args:
        storage: the tensors of the cache.
        pools: the blocks of each group.
        spec: the groups of layers.
    """

    def __init__(self, storage: KVCacheStorage, pools: Sequence[BlockPool], spec: KVCacheSpec) -> None:
        self._storage, self._pools, self._spec = storage, pools, spec
        tensors = [tensor for layer in range(len(storage.caches)) for tensor in storage.block_tensors(layer)]
        block_bytes = sum(tensor[:, 0].nbytes for tensor in tensors)
        self._num_ahead = max(PREFAULT_BYTES // max(block_bytes, 1), 1)
        self._num_populated = [0] * len(pools)
        self._pending: deque[tuple[int, int, int]] = deque()  # layer, first block, end block
        self._is_stopped = any(tensor.device.type != "cpu" for tensor in tensors)

    def populate_next(self) -> bool:
        """Allocate the pages of some blocks of one layer, which takes at most some milliseconds.

        Returns:
            Whether pages may remain to be allocated. Always False after `stop`, after the system could not
            allocate pages, and for a cache in the memory of a GPU.
        """
        if self._is_stopped:
            return False
        if not self._pending:
            self._extend()
        if not self._pending:
            return False
        self._is_stopped = not self._storage.populate(*self._pending.popleft())
        return not self._is_stopped

    def stop(self) -> None:
        """Allocate no more pages. `KVCacheManager.discard_storage` calls this method.

        After the storage is discarded, the pool allocates released blocks first. `_extend` would not allocate
        pages for these blocks, but for blocks that were never used.
        """
        self._is_stopped = True
        self._pending.clear()

    def _extend(self) -> None:
        """Queue further blocks of each group that has at most ``_num_ahead / 2`` populated, unused blocks."""
        for index, pool in enumerate(self._pools):
            if self._num_populated[index] - pool.num_ever_used > self._num_ahead // 2:
                continue
            first_block = max(self._num_populated[index], pool.num_ever_used)
            end_block = min(pool.num_ever_used + self._num_ahead, pool.num_blocks + 1)
            if first_block < end_block:
                self._num_populated[index] = end_block
                self._pending.extend(
                    (layer, first_block, end_block) for layer in self._spec.groups[index].layers
                )
