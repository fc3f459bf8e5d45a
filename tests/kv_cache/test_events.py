"""Events of the prefix cache, reset of the cache, and release of its memory."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch
from support.kv_contexts import kv_manager, run_one_step, store_and_check_keys, text_context

from penstock.host.memory import discard_pages
from penstock.kv_cache import KVCacheManager
from penstock.kv_cache.hashing import chain_digests, context_root
from penstock.pipelines.core import TextContext
from penstock.pipelines.core.cache_events import BlocksCleared, BlocksRemoved, BlocksStored, CacheEvent

PROMPT = list(range(10))


def full_block_digests(context: TextContext) -> list[bytes]:
    root = context_root(context, 0, None)
    assert root is not None
    return chain_digests(root, context.all_tokens, {}, range(context.current_length // 4), 4)


def apply_events(cached_digests: set[bytes], events: Iterable[CacheEvent]) -> set[bytes]:
    """Return the digests that are cached after these events."""
    for event in events:
        match event:
            case BlocksStored():
                cached_digests |= set(event.digests)
            case BlocksRemoved():
                assert set(event.digests) <= cached_digests
                cached_digests -= set(event.digests)
            case BlocksCleared():
                cached_digests = set()
    return cached_digests


def test_only_new_blocks_have_stored_events_with_digests_parent_and_tokens() -> None:
    manager, context = kv_manager(8), text_context(PROMPT)
    manager.record_events()
    run_one_step(manager, context, token=10)
    first_digest, second_digest = full_block_digests(context)
    assert manager.take_events() == [BlocksStored([first_digest, second_digest], None, PROMPT[:8])]
    assert manager.take_events() == []
    run_one_step(manager, context, token=11)
    run_one_step(manager, context, token=12)  # computes the twelfth token
    third_digest = full_block_digests(context)[2]
    assert manager.take_events() == [BlocksStored([third_digest], second_digest, [8, 9, 10, 11])]
    equal_context = text_context(PROMPT)
    run_one_step(manager, equal_context)
    assert manager.take_events() == []  # the context used cached blocks, so it stored none


def test_no_events_are_recorded_by_default() -> None:
    manager, context = kv_manager(8), text_context(PROMPT)
    run_one_step(manager, context)
    assert manager.take_events() == []


def test_an_eviction_is_recorded_as_a_removed_event() -> None:
    manager, context = kv_manager(4), text_context(PROMPT)
    manager.record_events()
    run_one_step(manager, context)
    manager.release(context)
    manager.take_events()
    other_context = text_context([50 + number for number in range(12)])
    run_one_step(manager, other_context)
    first_digest, second_digest = full_block_digests(text_context(PROMPT))
    events = manager.take_events()
    assert events[0] == BlocksRemoved([second_digest])  # the last block of a prompt is evicted first
    assert apply_events({first_digest, second_digest}, events) == {
        first_digest,
        *full_block_digests(other_context),
    }


@pytest.mark.parametrize("windows", [(None,), (None, 6), (6,)])
def test_applied_events_give_the_digests_in_the_first_pool(windows: tuple[int | None, ...]) -> None:
    random_numbers, known_digests = random.Random(7), set[bytes]()
    manager = kv_manager(*(9 for _ in windows), windows=windows)
    manager.record_events()
    for _ in range(60):
        context = text_context([random_numbers.randrange(2) for _ in range(random_numbers.randrange(1, 20))])
        run_one_step(manager, context, token=random_numbers.randrange(2))
        run_one_step(manager, context, token=random_numbers.randrange(2))
        manager.release(context)
        if random_numbers.random() < 0.05:
            manager.forget_prefixes()
        known_digests = apply_events(known_digests, manager.take_events())
        pool = manager._pools[0]
        assert known_digests == set(pool._blocks_by_digest)
        manager.check_integrity()


def test_a_reset_forgets_cached_blocks_and_keeps_running_requests() -> None:
    manager, context = kv_manager(8), text_context(PROMPT)
    manager.record_events()
    run_one_step(manager, context)
    manager.forget_prefixes()
    assert manager.take_events() == [BlocksCleared()]
    manager.check_integrity()
    equal_context = text_context(PROMPT)
    manager.claim(equal_context)
    assert equal_context.num_cached_tokens == 0
    manager.release(equal_context)
    compute_more_tokens(manager, context)
    manager.release(context)
    assert manager.num_free_blocks == 8
    manager.check_integrity()


def compute_more_tokens(manager: KVCacheManager, context: TextContext) -> None:
    for token in range(6):
        run_one_step(manager, context, token=token)  # checks the keys of all tokens


def test_discarded_storage_keeps_its_address_and_is_zero_and_reusable() -> None:
    manager, context = kv_manager(3000), text_context(PROMPT)
    run_one_step(manager, context)
    manager.release(context)
    cache = manager.storage.caches[0]
    address = cache.data_ptr()
    assert bool(cache.any())
    manager.discard_storage()
    assert manager.storage.caches[0].data_ptr() == address
    assert not bool(cache.any())
    second_context = text_context(PROMPT)
    manager.claim(second_context)
    assert second_context.num_cached_tokens == 0
    manager.reserve(second_context)
    store_and_check_keys(manager, [second_context])
    manager.release(second_context)
    manager.check_integrity()


def test_discard_pages_frees_and_zeroes_only_the_given_range() -> None:
    tensor = torch.ones(6_000_000, dtype=torch.uint8)
    bytes_before = resident_bytes()
    discard_pages(tensor.data_ptr() + 5, 5_900_000)
    assert bytes_before - resident_bytes() > 5_500_000
    assert int(tensor.sum()) == 100_000
    assert bool(tensor[:5].all())
    assert bool(tensor[5_900_005:].all())


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
