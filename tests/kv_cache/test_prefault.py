"""`CachePrefault`: which pages of the KV cache are allocated in advance."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch
from support.kv_contexts import text_context
from support.memory_pages import can_populate_pages

from penstock.dtype import DType
from penstock.host import memory
from penstock.host.memory import populate_pages
from penstock.kv_cache import KVCacheManager, KVCacheSpec, KVGroup, prefault
from penstock.pipelines.core import TextContext

NUM_BLOCKS = 401
BLOCK_SIZE = 16
KV_HEADS = 16
"""With 16 heads, no huge page contains both a block from 250 to 299 and a block below 161 or above 370."""
NUM_AHEAD = 100
BLOCK_BYTES = KV_HEADS * (2 * BLOCK_SIZE * 64 * (4 + 4 + 1) + 2 * BLOCK_SIZE * 4)
"""Bytes of a block of all layers: keys and values of two float32 layers and of one int8 layer with scales."""

pytestmark = pytest.mark.skipif(not can_populate_pages(), reason="MADV_POPULATE_WRITE needs Linux 5.14")


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> KVCacheManager:
    """Return the manager of a cache of two groups that prefaults `NUM_AHEAD` blocks in advance."""
    monkeypatch.setattr(prefault, "PREFAULT_BYTES", NUM_AHEAD * BLOCK_BYTES)
    groups = (KVGroup((0, 2), KV_HEADS, 64, DType.float32), KVGroup((1,), KV_HEADS, 64, DType.int8, 64))
    manager = KVCacheManager(KVCacheSpec(groups), (NUM_BLOCKS, NUM_BLOCKS), BLOCK_SIZE)
    manager.storage.discard()  # the allocator may have returned memory of an earlier test
    return manager


def are_resident(part: torch.Tensor) -> list[bool]:
    """Return for each page of a tensor whether the system has allocated it (mincore(2))."""
    begin = part.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = part.data_ptr() + part.nbytes - begin
    states = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), states)
    return [bool(state & 1) for state in states]


def is_populated(manager: KVCacheManager, layer: int, first: int, end: int) -> bool:
    """Return whether all pages of the blocks ``first`` to ``end - 1`` of a layer are allocated."""
    tensors = manager.storage.block_tensors(layer)
    return all(all(are_resident(part[first:end])) for tensor in tensors for part in tensor)


def has_populated_later_blocks(manager: KVCacheManager) -> bool:
    """Return whether any page of the blocks 250 to 299 of layer 0 is allocated."""
    return any(any(are_resident(part[250:300])) for part in manager.storage.caches[0])


def use_blocks(manager: KVCacheManager, count: int, token: int = 1) -> TextContext:
    """Return a context that holds ``count`` blocks of each group."""
    context = text_context([token] * (BLOCK_SIZE * count))
    manager.claim(context)
    manager.reserve(context)
    return context


def populate_all(manager: KVCacheManager) -> int:
    """Call `prefault_next_pages` as an idle worker does. Return the number of calls that allocated pages."""
    count = 0
    while manager.prefault_next_pages():
        count += 1
        assert count < 100, "prefault_next_pages does not end"
    return count


def test_pages_of_the_next_blocks_are_allocated_layer_by_layer(manager: KVCacheManager) -> None:
    assert not any(is_populated(manager, layer, 1, 1 + NUM_AHEAD) for layer in range(3))
    assert manager.prefault_next_pages()
    assert [is_populated(manager, layer, 1, 1 + NUM_AHEAD) for layer in range(3)].count(True) == 1
    assert populate_all(manager) == 2
    assert all(is_populated(manager, layer, 1, 1 + NUM_AHEAD) for layer in range(3))
    assert not has_populated_later_blocks(manager)
    assert not manager.prefault_next_pages()


def test_more_pages_are_allocated_when_half_of_the_prefaulted_blocks_are_used(
    manager: KVCacheManager,
) -> None:
    populate_all(manager)
    use_blocks(manager, NUM_AHEAD // 2 - 1)
    assert populate_all(manager) == 0
    use_blocks(manager, 10, token=2)
    assert populate_all(manager) == 3
    num_used_blocks = NUM_AHEAD // 2 + 9
    assert all(is_populated(manager, layer, 1, num_used_blocks + NUM_AHEAD) for layer in range(3))
    assert not has_populated_later_blocks(manager)


def test_blocks_that_are_used_again_need_no_pages(manager: KVCacheManager) -> None:
    populate_all(manager)
    for token in range(40):
        manager.release(use_blocks(manager, 2, token))
    assert populate_all(manager) == 0


def test_pages_of_all_blocks_can_be_allocated(manager: KVCacheManager) -> None:
    for token in range(9):
        populate_all(manager)
        use_blocks(manager, 40, token)
    populate_all(manager)
    assert is_populated(manager, 0, 1, NUM_BLOCKS)
    assert not manager.prefault_next_pages()


def test_prefaulting_keeps_the_contents_of_blocks(manager: KVCacheManager) -> None:
    for layer in range(3):
        for number, tensor in enumerate(manager.storage.block_tensors(layer)):
            tensor[:, 3:9] = 5 + number
    populate_all(manager)
    for layer in range(3):
        for number, tensor in enumerate(manager.storage.block_tensors(layer)):
            assert (tensor[:, 3:9] == 5 + number).all()
            assert not tensor[:, 9:].any()


def test_discarded_memory_of_used_blocks_is_not_prefaulted_again(manager: KVCacheManager) -> None:
    populate_all(manager)
    context = use_blocks(manager, NUM_AHEAD - 1)
    manager.release(context)
    manager.discard_storage()
    assert populate_all(manager) == 0
    assert not is_populated(manager, 0, 1, 1 + NUM_AHEAD)


def test_prefaulting_ends_at_once_without_the_system_call(
    manager: KVCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 9999)
    assert not manager.prefault_next_pages()
    assert not manager.prefault_next_pages()


def test_a_block_larger_than_the_limit_is_prefaulted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "PREFAULT_BYTES", 1)
    group = KVGroup((0,), 1, 64, DType.float32)
    manager = KVCacheManager(KVCacheSpec((group,)), (NUM_BLOCKS,), BLOCK_SIZE)
    manager.storage.discard()
    assert populate_all(manager) == 1
    assert is_populated(manager, 0, 1, 2)
    use_blocks(manager, 1)
    assert populate_all(manager) == 1
    assert is_populated(manager, 0, 2, 3)


def test_ranges_that_are_not_aligned_to_pages_are_populated() -> None:
    part = torch.from_numpy(memory.huge_pages(64 << 10))[mmap.PAGESIZE + 100 : 3 * mmap.PAGESIZE + 8]
    assert populate_pages(part.data_ptr(), part.nbytes)
    assert all(are_resident(part))
