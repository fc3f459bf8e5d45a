"""The pool of KV cache blocks: allocation, reference counts, prefix lookup, eviction."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.random_draws import num_examples

from penstock.errors import InsufficientBlocksError
from penstock.kv_cache.block_pool import BlockPool


def test_blocks_are_allocated_in_order_without_the_null_block() -> None:
    pool = BlockPool(5)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert (pool.num_blocks, pool.num_free) == (4, 0)


def test_a_failed_allocation_allocates_no_block() -> None:
    pool = BlockPool(5)
    pool.allocate(2)
    with pytest.raises(InsufficientBlocksError, match="3 KV blocks are needed, 2 of 4 are free") as exc_info:
        pool.allocate(3)
    assert (exc_info.value.needed, exc_info.value.free, exc_info.value.total) == (3, 2, 4)
    assert pool.num_free == 2
    pool.check_integrity()


def test_a_released_registered_block_is_found_until_eviction() -> None:
    pool = BlockPool(3)
    cached_block, free_block = pool.allocate(2)
    pool.register(cached_block, b"one")
    pool.release([cached_block, free_block])
    assert (pool.num_free, pool.num_cached) == (2, 1)
    assert pool.lookup(b"one") == cached_block
    assert pool.allocate(1) == [free_block]  # a free block is allocated before a cached block is evicted
    assert pool.allocate(1) == [cached_block]
    assert pool.lookup(b"one") is None


def test_blocks_that_are_released_together_are_evicted_in_reverse_order() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.register(block, b"%d" % block)
    pool.release(blocks)
    assert [pool.allocate(1)[0] for _ in blocks] == blocks[::-1]


def test_the_least_recently_used_block_is_evicted_first() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.register(block, b"%d" % block)
        pool.release([block])
    pool.retain([blocks[0]])
    pool.release([blocks[0]])
    assert [pool.allocate(1)[0] for _ in blocks] == [blocks[1], blocks[2], blocks[0]]


def test_the_first_of_two_blocks_with_the_same_digest_stays_registered() -> None:
    pool = BlockPool(3)
    first_block, second_block = pool.allocate(2)
    assert pool.register(first_block, b"same")
    assert not pool.register(second_block, b"same")
    pool.release([first_block, second_block])
    assert pool.lookup(b"same") == first_block
    assert (pool.num_free, pool.num_cached) == (2, 1)
    pool.check_integrity()


def test_a_referenced_block_is_not_evicted() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.register(block, b"kept")
    pool.retain([block])
    pool.release([block])
    with pytest.raises(InsufficientBlocksError):
        pool.allocate(1)
    assert pool.lookup(b"kept") == block


def test_releasing_a_block_twice_raises_an_assertion_error() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="block 1 is released but not in use"):
        pool.release(blocks)


def test_check_integrity_reports_a_lost_block() -> None:
    pool = BlockPool(5)
    pool.allocate(1)
    pool._free_blocks.pop()
    with pytest.raises(AssertionError, match=r"2 free \+ 1 referenced \+ 0 cached blocks != 4"):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """A random test that compares the pool with a simple model of lists and a dict."""

    NUM_BLOCKS = 8

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS + 1)
        self.referenced: list[int] = []  # one entry per reference
        self.digests: dict[int, bytes] = {}
        self.evictable: list[int] = []  # registered and unreferenced blocks, least recently used first

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        if count > self.NUM_BLOCKS - len(set(self.referenced)):
            with pytest.raises(InsufficientBlocksError):
                self.pool.allocate(count)
            return
        num_uncached = self.NUM_BLOCKS - len(set(self.referenced)) - len(self.evictable)
        num_evicted = max(0, count - num_uncached)
        evicted_blocks, self.evictable = self.evictable[:num_evicted], self.evictable[num_evicted:]
        for block in evicted_blocks:
            del self.digests[block]
        blocks = self.pool.allocate(count)
        assert blocks[min(count, num_uncached) :] == evicted_blocks
        assert not set(blocks) & {0, *self.referenced, *self.evictable}
        assert len(set(blocks)) == count
        self.referenced += blocks

    @precondition(lambda self: self.referenced)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.referenced))
        self.referenced.remove(block)
        self.pool.release([block])
        if block not in self.referenced and block in self.digests:
            self.evictable.append(block)

    @precondition(lambda self: self.referenced)
    @rule(data=st.data(), content=st.integers(0, 6))
    def register(self, data: st.DataObject, content: int) -> None:
        block = data.draw(st.sampled_from(self.referenced))
        if block in self.digests:
            return
        is_new = b"%d" % content not in self.digests.values()
        assert self.pool.register(block, b"%d" % content) == is_new
        if is_new:
            self.digests[block] = b"%d" % content

    @rule(content=st.integers(0, 6))
    def use_again(self, content: int) -> None:
        block = self.pool.lookup(b"%d" % content)
        if block is not None:
            self.pool.retain([block])
            self.referenced.append(block)
            if block in self.evictable:
                self.evictable.remove(block)

    @invariant()
    def pool_equals_the_model(self) -> None:
        self.pool.check_integrity()
        assert {block: self.pool.num_references(block) for block in set(self.referenced)} == Counter(
            self.referenced
        )
        assert self.pool.num_free == self.NUM_BLOCKS - len(set(self.referenced))
        assert self.pool.num_cached == len(self.evictable)
        assert all(self.pool.lookup(digest) == block for block, digest in self.digests.items())


TestPools = PoolMachine.TestCase
TestPools.settings = settings(max_examples=num_examples(60), stateful_step_count=30, deadline=None)
