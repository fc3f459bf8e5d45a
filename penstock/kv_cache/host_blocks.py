"""`HostBlocks`: cached blocks that were evicted from the device, in host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kv_cache.block_pool import BlockPool
from penstock.kv_cache.spec import KVCacheSpec
from penstock.kv_cache.storage import KVCacheStorage


class HostBlocks:
    """Stores blocks that the pools evict, and moves them back into free blocks of the device.

    If the host memory is full, a new block replaces the block that was evicted first. On a GPU, copies use
    pinned memory and are queued on the stream of the kernels, so that a block is saved before a later step
    overwrites it.

    Args:
        spec: the groups of layers.
        pools: the pools of the groups. The constructor sets `BlockPool.on_reuse` to save evicted blocks.
        storage: the tensors of the cache.
        num_bytes: host memory for blocks, divided evenly among the groups.
    """

    def __init__(
        self, spec: KVCacheSpec, pools: Sequence[BlockPool], storage: KVCacheStorage, num_bytes: int
    ) -> None:
        self._pools = pools
        # One entry per group of layers. C is the number of slots: the blocks that fit into host memory.
        self._device_tensors: list[list[Tensor]] = []  # tensors [2, N, ...]
        self._host_tensors: list[list[Tensor]] = []  # tensors [2, C, ...]
        self._slots: list[OrderedDict[bytes, int]] = []  # digest -> slot, oldest eviction first
        self._free_slots: list[list[int]] = []
        self.num_saved = self.num_restored = 0
        for index, (group, pool) in enumerate(zip(spec.groups, pools, strict=True)):
            tensors = [tensor for layer in group.layers for tensor in storage.block_tensors(layer)]
            capacity = num_bytes // len(pools) // sum(tensor[:, 0].nbytes for tensor in tensors)
            self._device_tensors.append(tensors)
            self._host_tensors.append([_host_tensor(tensor, capacity) for tensor in tensors])
            self._slots.append(OrderedDict())
            self._free_slots.append(list(range(capacity)))
            pool.on_reuse = lambda block, digest, index=index: self._save(index, block, digest)

    @property
    def num_blocks(self) -> int:
        """The number of blocks of a group that fit into host memory, in the group with the fewest."""
        return min(
            len(slots) + len(free_slots)
            for slots, free_slots in zip(self._slots, self._free_slots, strict=True)
        )

    def restore(self, digests: Sequence[bytes], num_cached: int) -> None:
        """Move the blocks after a cached prefix back to the device, in order.

        The method stops at the first block that a group has neither on the device nor in host memory, or for
        which a group has no free block on the device. Moved blocks become cached blocks of the device.
        Nothing is moved unless all groups have the first block after the prefix in host memory.

        Args:
            digests: the digests of a context's blocks, up to the last block that the context may use.
            num_cached: the number of blocks of the cached prefix.
        """
        if num_cached == len(digests) or not all(digests[num_cached] in slots for slots in self._slots):
            return
        retained_blocks = [
            [block for digest in digests[:num_cached] if (block := pool.lookup(digest)) is not None]
            for pool in self._pools
        ]
        for pool, blocks in zip(self._pools, retained_blocks, strict=True):
            pool.retain(blocks)  # prevents the eviction of these blocks by `_load`
        for digest in digests[num_cached:]:
            missing_groups = [index for index, pool in enumerate(self._pools) if pool.lookup(digest) is None]
            if any(
                digest not in self._slots[group] or not self._pools[group].num_free
                for group in missing_groups
            ):
                break
            for index in missing_groups:
                retained_blocks[index].append(self._load(index, digest))
        for pool, blocks in zip(self._pools, retained_blocks, strict=True):
            pool.release(blocks)

    def clear(self) -> None:
        """Remove all blocks from host memory."""
        for slots, free_slots in zip(self._slots, self._free_slots, strict=True):
            free_slots += slots.values()
            slots.clear()

    def _save(self, index: int, block: int, digest: bytes) -> None:
        slots, free_slots = self._slots[index], self._free_slots[index]
        if digest in slots:
            slots.move_to_end(digest)
            return
        if not free_slots:
            if not slots:
                return
            free_slots.append(slots.popitem(last=False)[1])
        slots[digest] = slot = free_slots.pop()
        for source, target in zip(self._device_tensors[index], self._host_tensors[index], strict=True):
            target[:, slot].copy_(source[:, block], non_blocking=True)
        self.num_saved += 1

    def _load(self, index: int, digest: bytes) -> int:
        """Move a block into a free block of the device, register it, and return it with one reference."""
        slot = self._slots[index].pop(digest)  # before `allocate`, which may evict and save another block
        (block,) = self._pools[index].allocate(1)
        for target, source in zip(self._device_tensors[index], self._host_tensors[index], strict=True):
            target[:, block].copy_(source[:, slot], non_blocking=True)
        self._free_slots[index].append(slot)
        self._pools[index].register(block, digest)
        self.num_restored += 1
        return block


def _host_tensor(tensor: Tensor, capacity: int) -> Tensor:
    shape = (tensor.shape[0], capacity, *tensor.shape[2:])
    return torch.empty(shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
