"""`KVCacheManager`: claims, reservations, shared prefixes, windows, key limits, forks, rollbacks, inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.kv_contexts import (
    block_tables,
    kv_manager,
    kv_spec,
    run_one_step,
    store_and_check_keys,
    text_context,
)

from penstock.dtype import DType
from penstock.errors import ConfigError, InputError, InsufficientBlocksError
from penstock.kv_cache import KVCacheManager, KVCacheSpec, KVCacheStorage, KVGroup, restart
from penstock.pipelines.core import InputContext, TextAndVisionContext

PROMPT = list(range(10))


def adapter_name(context: InputContext) -> bytes:
    return str(context.adapter).encode()


# -- claim --------------------------------------------------------------------------------------------


def test_claim_assigns_the_lowest_free_slot() -> None:
    manager = kv_manager(8)
    contexts = [text_context(PROMPT) for _ in range(3)]
    for context in contexts:
        manager.claim(context)
    assert [context.cache_seq_id for context in contexts] == [0, 1, 2]
    manager.release(contexts[0])
    manager.release(contexts[1])
    manager.claim(contexts[1])
    assert contexts[1].cache_seq_id == 0
    manager.check_integrity()


def test_a_claim_in_an_empty_cache_reuses_no_blocks() -> None:
    manager, context = kv_manager(8), text_context(PROMPT)
    manager.claim(context)
    assert (context.start_idx, context.num_cached_tokens) == (0, 0)
    assert manager.num_free_blocks == manager.num_blocks == 8


def test_claiming_twice_changes_nothing() -> None:
    manager, context = kv_manager(8), text_context(PROMPT)
    run_one_step(manager, context)
    manager.claim(context)
    assert (context.cache_seq_id, context.start_idx) == (0, 10)


@pytest.mark.parametrize(
    ("prompt", "num_cached"),
    [
        (PROMPT, 8),
        (PROMPT[:9], 8),
        (PROMPT[:8], 4),  # the last token is always computed, because its logits are needed
        (PROMPT[:7], 4),
        (PROMPT[:4], 0),
        ([*PROMPT[:5], 99, *PROMPT[6:]], 4),
        ([99, *PROMPT[1:]], 0),
    ],
)
def test_full_blocks_of_a_cached_prefix_are_shared(prompt: list[int], num_cached: int) -> None:
    manager, cached_context = kv_manager(8), text_context(PROMPT)
    run_one_step(manager, cached_context)
    context, num_blocks = text_context(prompt), num_cached // 4
    manager.claim(context)
    assert context.start_idx == context.num_cached_tokens == context.committed_idx == num_cached
    shared_blocks = block_tables(manager, context)[0][:num_blocks]
    assert shared_blocks == block_tables(manager, cached_context)[0][:num_blocks]
    run_one_step(manager, context)
    manager.check_integrity()


def test_a_prefix_outlives_its_context() -> None:
    manager, first_context = kv_manager(8), text_context(PROMPT)
    run_one_step(manager, first_context)
    manager.release(first_context)
    assert manager.num_free_blocks == 8
    second_context = text_context(PROMPT)
    run_one_step(manager, second_context)
    assert second_context.num_cached_tokens == 8


def test_blocks_of_generated_tokens_are_shared() -> None:
    manager, first_context = kv_manager(8), text_context(PROMPT)
    for token in (50, 51, 52):
        run_one_step(manager, first_context, token)
    manager.release(first_context)
    second_context = text_context([*PROMPT, 50, 51, 52, 53])
    manager.claim(second_context)
    assert second_context.num_cached_tokens == 12


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"cache_salt": "ours"}, {}),
        ({"adapter": "poet"}, {"adapter_digest": adapter_name}),
        ({"token_hash_overrides": {2: 7}}, {}),
        ({"log_probabilities_echo": True}, {}),
        ({}, {"enable_prefix_caching": False}),
    ],
)
def test_a_different_salt_adapter_or_hash_or_an_echo_or_disabled_caching_prevents_sharing(
    fields: dict[str, Any], options: dict[str, Any]
) -> None:
    manager, first_context = kv_manager(9, **options), text_context(PROMPT)
    run_one_step(manager, first_context)
    second_context = text_context(PROMPT, **fields)
    manager.claim(second_context)
    assert (second_context.start_idx, second_context.num_cached_tokens) == (0, 0)
    run_one_step(manager, second_context)


@pytest.mark.parametrize(
    "fields", [{"cache_salt": "ours"}, {"adapter": "poet"}, {"token_hash_overrides": {2: 7}}]
)
def test_prefixes_with_equal_salt_adapter_and_hashes_are_shared(fields: dict[str, Any]) -> None:
    manager = kv_manager(9, adapter_digest=adapter_name)
    first_context, second_context = text_context(PROMPT, **fields), text_context(PROMPT, **fields)
    run_one_step(manager, first_context)
    manager.claim(second_context)
    assert second_context.num_cached_tokens == 8


def test_blocks_of_images_without_digests_are_not_shared() -> None:
    def cached_tokens_with(overrides: dict[int, int], num_images: int = 1) -> int:
        manager = kv_manager(8)
        for _ in range(2):
            context = TextAndVisionContext(
                prompt="",
                max_length=50,
                tokens=np.array(PROMPT),
                pixel_values=(np.ones(3),) * num_images,
                token_hash_overrides=overrides,
            )
            manager.claim(context)
            num_cached = context.start_idx
            run_one_step(manager, context)
            manager.release(context)
        return num_cached

    assert cached_tokens_with({}) == 0
    assert cached_tokens_with({1: 77}) == cached_tokens_with({}, num_images=0) == 8


def test_blocks_of_an_adapter_without_a_digest_are_not_shared() -> None:
    manager = kv_manager(9)
    for _ in range(2):
        context = text_context(PROMPT, adapter="poet")
        run_one_step(manager, context)
        assert context.num_cached_tokens == 0


def test_blocks_of_an_echoing_context_are_shared() -> None:
    manager, echoing_context = kv_manager(8), text_context(PROMPT, log_probabilities_echo=True)
    run_one_step(manager, echoing_context)
    plain_context = text_context(PROMPT)
    manager.claim(plain_context)
    assert plain_context.num_cached_tokens == 8


def test_a_preempted_context_reuses_its_blocks_and_keeps_its_cached_count() -> None:
    manager, context = kv_manager(8), text_context(PROMPT)
    for token in (50, 51, 52):
        run_one_step(manager, context, token)
    manager.release(context)
    context.reset()
    manager.claim(context)
    assert (context.start_idx, context.active_length, context.num_cached_tokens) == (12, 1, 0)
    run_one_step(manager, context, 53)
    manager.check_integrity()


def test_a_slot_assigned_by_another_cache_is_refused() -> None:
    manager, context = kv_manager(8), text_context(PROMPT)
    context.assign_to_cache(5)
    with pytest.raises(InputError, match="slot 5, but not by this KV cache"):
        manager.claim(context)


# -- reserve ------------------------------------------------------------------------------------------


def test_reserve_covers_active_tokens_and_lookahead() -> None:
    manager, context = kv_manager(8), text_context(PROMPT)
    manager.claim(context)
    manager.reserve(context)
    assert block_tables(manager, context) == [[1, 2, 3]]
    manager.reserve(context, lookahead=2)
    assert block_tables(manager, context) == [[1, 2, 3]]
    manager.reserve(context, lookahead=3)
    assert block_tables(manager, context) == [[1, 2, 3, 4]]
    manager.reserve(context)
    assert manager.num_free_blocks == 4


def test_reserve_is_all_or_nothing_over_all_groups() -> None:
    manager = kv_manager(8, 2, windows=(None, 4))
    context = text_context(PROMPT)
    manager.claim(context)
    with pytest.raises(InsufficientBlocksError, match="3 KV blocks are needed, 2 of 2 are free"):
        manager.reserve(context)
    assert block_tables(manager, context) == [[0], [0]]
    manager.check_integrity()
    context.set_token_indices(active_idx=8)
    manager.reserve(context)
    assert block_tables(manager, context) == [[1, 2], [1, 2]]


def test_reserve_evicts_the_least_recently_used_prefix() -> None:
    manager = kv_manager(4)
    old_context, new_context = text_context([1, 1, 1, 1, 1]), text_context([2, 2, 2, 2, 2])
    for context in (old_context, new_context):
        run_one_step(manager, context)
        manager.release(context)
    run_one_step(manager, text_context(list(range(30, 42)), max_length=13))
    for prompt, num_cached in (([1] * 5, 0), ([2] * 5, 4)):
        equal_context = text_context(prompt)
        manager.claim(equal_context)
        assert equal_context.num_cached_tokens == num_cached
        manager.release(equal_context)


def test_reserve_needs_a_claim() -> None:
    with pytest.raises(ValueError, match="not currently assigned"):
        kv_manager(4).reserve(text_context(PROMPT))


# -- commit -------------------------------------------------------------------------------------------


def test_only_computed_full_blocks_are_registered() -> None:
    manager, first_context = kv_manager(8), text_context(PROMPT)
    run_one_step(manager, first_context, chunk=6)
    second_context = text_context(PROMPT)
    manager.claim(second_context)
    assert (first_context.committed_idx, second_context.num_cached_tokens) == (4, 4)


def test_the_first_of_two_equal_blocks_stays_registered() -> None:
    manager = kv_manager(8)
    first_context, second_context = text_context(PROMPT), text_context(PROMPT)
    manager.claim(first_context)
    manager.claim(second_context)
    run_one_step(manager, first_context)
    run_one_step(manager, second_context)
    third_context = text_context(PROMPT)
    manager.claim(third_context)
    assert block_tables(manager, third_context)[0] == block_tables(manager, first_context)[0][:2]
    manager.release(second_context)
    assert manager.num_free_blocks == 8 - 3
    manager.check_integrity()


def test_blocks_before_the_window_are_freed_and_stay_cached() -> None:
    manager = kv_manager(8, 8, windows=(None, 6))
    context = text_context(list(range(17)))
    run_one_step(manager, context)
    # The query at position 17 sees positions 12 to 17.
    assert block_tables(manager, context) == [[1, 2, 3, 4, 5], [0, 0, 0, 4, 5]]
    assert manager.num_free_blocks == 3
    equal_context = text_context(list(range(17)))
    manager.claim(equal_context)
    assert equal_context.num_cached_tokens == 16
    # The query at position 16 sees positions 11 to 16.
    assert block_tables(manager, equal_context) == [
        [1, 2, 3, 4],
        [0, 0, 3, 4],
    ]
    run_one_step(manager, equal_context)
    manager.check_integrity()


def test_a_windowed_sequence_may_outgrow_its_pool() -> None:
    manager = kv_manager(50, 4, windows=(None, 6))
    context = text_context(list(range(8)))
    for token in range(150):
        run_one_step(manager, context, token)
    assert context.current_length == 158
    manager.check_integrity()


def test_a_prefix_hit_needs_the_blocks_within_the_window() -> None:
    manager = kv_manager(20, 5, windows=(None, 6))
    long_context = text_context(list(range(21)))
    while long_context.start_idx < 20:
        run_one_step(manager, long_context, 99, chunk=4)
    manager.release(long_context)
    # The windowed pool has five blocks, which now contain the last 20 tokens.
    run_one_step(manager, text_context([7, 7, 7, 7, 7]))  # evicts the two oldest blocks
    for length, num_cached in ((21, 20), (17, 16), (13, 0)):
        shorter_context = text_context(list(range(length)))
        manager.claim(shorter_context)
        assert shorter_context.num_cached_tokens == num_cached, length
        manager.release(shorter_context)


# -- Regimes ------------------------------------------------------------------------------------------
# A regime is a range of sequence lengths. The keys of one regime are invalid in every other regime.


@pytest.mark.parametrize(
    ("length", "regime", "min_length", "steps_left"),
    [(1, 0, 0, 7), (7, 0, 0, 1), (8, 1, 8, 5), (12, 1, 8, 1), (13, 2, 13, None), (99, 2, 13, None)],
)
def test_a_length_determines_the_regime_and_the_steps_left(
    length: int, regime: int, min_length: int, steps_left: int | None
) -> None:
    spec = kv_spec(None, key_limits=(7, 12))
    assert (spec.regime(length), spec.min_regime_length(length)) == (regime, min_length)
    assert spec.steps_left(length) == steps_left
    assert (kv_spec(None).regime(length), kv_spec(None).steps_left(length)) == (0, None)


@pytest.mark.parametrize("limits", [(8, 4), (4, 4), (0,), (-1, 5)])
def test_key_limits_must_be_positive_and_ascending(limits: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"key_limits: must ascend from 1 on"):
        kv_spec(None, key_limits=limits)


def test_a_context_beyond_its_key_limit_is_stale_until_recomputed() -> None:
    manager, context = kv_manager(16, key_limits=(11,)), text_context(PROMPT)
    assert not manager.is_stale(context), "the context has no keys yet"
    run_one_step(manager, context)
    assert not manager.is_stale(context)
    run_one_step(manager, context)
    assert context.current_length == 12
    assert manager.is_stale(context)
    restart(manager, context)
    assert (context.start_idx, context.active_idx, context.committed_idx) == (0, 12, 0)
    assert not manager.is_stale(context)
    run_one_step(manager, context)
    assert not manager.is_stale(context)
    manager.check_integrity()


def test_a_context_rolled_back_below_the_limit_is_stale() -> None:
    manager, context = kv_manager(16, key_limits=(9,)), text_context(PROMPT)
    run_one_step(manager, context)
    context.rollback(2)
    assert manager.is_stale(context)


def test_a_fork_has_the_regime_of_its_parent() -> None:
    manager, parent = kv_manager(16, key_limits=(10,)), text_context(PROMPT)
    run_one_step(manager, parent)
    child = text_context([*PROMPT, 7])
    manager.fork(parent, child)
    assert manager.is_stale(parent)
    assert manager.is_stale(child)


def test_prefixes_are_shared_only_within_a_regime() -> None:
    manager = kv_manager(32, key_limits=(10,))
    run_one_step(manager, text_context(PROMPT))
    run_one_step(manager, text_context([*PROMPT, 7]))
    cached_counts = []
    for prompt in (PROMPT[:9], [*PROMPT, 8], [*PROMPT, 7, 7, 7]):
        context = text_context(prompt)
        manager.claim(context)
        cached_counts.append(context.num_cached_tokens)
    assert cached_counts == [8, 8, 8]
    new_manager = kv_manager(32, key_limits=(10,))
    run_one_step(new_manager, text_context(PROMPT))
    context = text_context([*PROMPT, 7])
    new_manager.claim(context)
    assert context.num_cached_tokens == 0


# -- fork ---------------------------------------------------------------------------------------------


def test_a_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    manager = kv_manager(8)
    parent, child = text_context(PROMPT), text_context(PROMPT)
    run_one_step(manager, parent, 50)
    child.update(51)
    manager.fork(parent, child)
    assert (block_tables(manager, parent), block_tables(manager, child)) == ([[1, 2, 3]], [[1, 2, 4]])
    assert (child.start_idx, child.committed_idx, child.cache_seq_id) == (10, 8, 1)
    for token in (60, 61, 62):
        for context in (parent, child):
            run_one_step(manager, context, token)
    manager.release(parent)
    run_one_step(manager, child, 63)
    manager.check_integrity()


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    manager = kv_manager(3)
    parent, child = text_context(PROMPT[:8]), text_context(PROMPT[:8])
    run_one_step(manager, parent, 50)
    child.update(51)
    manager.fork(parent, child)
    assert block_tables(manager, child) == [[1, 2]]
    assert manager.num_free_blocks == 1


def test_a_fork_without_free_blocks_changes_nothing() -> None:
    manager = kv_manager(3)
    parent, child = text_context(PROMPT), text_context(PROMPT)
    run_one_step(manager, parent, 50)
    child.update(51)
    with pytest.raises(InsufficientBlocksError):
        manager.fork(parent, child)
    assert not child.is_assigned_to_cache
    manager.check_integrity()


def test_a_fork_with_tokens_that_differ_from_the_parent_is_refused() -> None:
    manager = kv_manager(8)
    parent, child = text_context(PROMPT), text_context(PROMPT[::-1])
    run_one_step(manager, parent, 50)
    with pytest.raises(AssertionError, match="does not begin with the 10 computed tokens"):
        manager.fork(parent, child)


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_of_a_context_longer_than_the_window_can_continue(caching: bool) -> None:
    manager = kv_manager(20, 20, windows=(None, 6), enable_prefix_caching=caching)
    parent, child = text_context(list(range(18))), text_context(list(range(18)))
    run_one_step(manager, parent, 50)
    child.update(51)
    manager.fork(parent, child)
    for token in range(60, 70):
        for context in (parent, child):
            run_one_step(manager, context, token)
    manager.check_integrity()


# -- release ------------------------------------------------------------------------------------------


def test_release_is_idempotent_and_affects_only_its_context() -> None:
    manager = kv_manager(8)
    first_context, second_context = text_context(PROMPT), text_context(PROMPT)
    run_one_step(manager, first_context)
    manager.claim(second_context)
    for _ in range(2):
        manager.release(first_context)
        assert not first_context.is_assigned_to_cache
        manager.check_integrity()
    assert manager.num_free_blocks == 6
    manager.release(second_context)
    assert manager.num_free_blocks == 8


# -- rollback -----------------------------------------------------------------------------------------


def test_a_rolled_back_context_keeps_its_surplus_blocks() -> None:
    manager, context = kv_manager(8), text_context(PROMPT)
    run_one_step(manager, context, 50)
    manager.reserve(context, lookahead=5)
    tables_before = block_tables(manager, context)
    context.rollback(1)
    manager.reserve(context)
    assert block_tables(manager, context) == tables_before == [[1, 2, 3, 4]]
    run_one_step(manager, context, 51)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("generates_again", [False, True])
def test_a_rollback_does_not_write_into_shared_blocks(caching: bool, generates_again: bool) -> None:
    manager = kv_manager(12, enable_prefix_caching=caching)
    parent, child = text_context(PROMPT), text_context(PROMPT)
    run_one_step(manager, parent, 50)
    child.update(50)
    manager.fork(parent, child)
    child.rollback(6)  # 5 tokens remain, and the last one must be recomputed
    for token in range(70, 76 if generates_again else 70):
        child.update(token)
    for token in range(80, 84):
        for context in (child, parent):
            run_one_step(manager, context, token)
    manager.check_integrity()
    assert block_tables(manager, child)[0][0] == block_tables(manager, parent)[0][0]
    assert block_tables(manager, child)[0][1] != block_tables(manager, parent)[0][1]


def test_blocks_are_registered_by_their_new_tokens_after_a_rollback() -> None:
    manager, context = kv_manager(12), text_context(PROMPT[:9])
    run_one_step(manager, context, 50)  # two blocks are registered: positions 0 to 7
    context.rollback(4)
    for token in (70, 71, 72, 73):
        run_one_step(manager, context, token)
    new_tokens = context.all_tokens[4:8].tolist()
    for prompt in ([*PROMPT[:4], *new_tokens, 9], [*PROMPT[:8], *new_tokens, 9], [*PROMPT[:9]]):
        later_context = text_context(prompt)
        manager.claim(later_context)
        assert later_context.num_cached_tokens == 8
        manager.release(later_context)


def test_a_rollback_that_needs_freed_blocks_restarts_the_context() -> None:
    manager = kv_manager(12, 12, windows=(None, 4))
    context = text_context(PROMPT)
    run_one_step(manager, context, 50)
    context.rollback(3)
    manager.reserve(context)
    assert context.start_idx == 0
    run_one_step(manager, context, 51)
    manager.check_integrity()


# -- waits_for and admits -----------------------------------------------------------------------------


def test_a_context_waits_for_a_prefix_in_flight() -> None:
    manager = kv_manager(8)
    first_context, equal_context = text_context(PROMPT), text_context(PROMPT)
    other_context = text_context([9, *PROMPT])
    assert not manager.waits_for(equal_context)
    manager.claim(first_context)
    assert manager.waits_for(equal_context)
    assert not manager.waits_for(other_context)
    assert not manager.waits_for(first_context)
    run_one_step(manager, first_context, chunk=4)
    assert manager.waits_for(equal_context)
    run_one_step(manager, first_context, chunk=4)
    assert not manager.waits_for(equal_context)
    manager.claim(equal_context)
    assert equal_context.num_cached_tokens == 8


def test_a_context_does_not_wait_for_an_unusable_block() -> None:
    manager = kv_manager(8)
    manager.claim(text_context(PROMPT[:8]))
    assert manager.waits_for(text_context(PROMPT[:5]))
    assert not manager.waits_for(text_context(PROMPT[:4]))
    assert not manager.waits_for(text_context(PROMPT, log_probabilities_echo=True))
    assert not manager.waits_for(text_context(PROMPT, cache_salt="ours"))


def test_a_context_does_not_wait_for_a_released_context() -> None:
    manager = kv_manager(8)
    first_context, second_context = text_context(PROMPT), text_context(PROMPT)
    manager.claim(first_context)
    assert manager.waits_for(second_context)
    manager.release(first_context)
    assert not manager.waits_for(second_context)
    manager.check_integrity()


def test_tokens_may_be_appended_to_a_waiting_context() -> None:
    manager = kv_manager(8)
    run_one_step(manager, text_context(PROMPT))
    context = text_context(PROMPT[:5])
    assert manager.admits(context)
    for token in PROMPT[5:]:
        context.jump_ahead(token)
    manager.claim(context)
    assert context.start_idx == 8


def test_stored_digests_are_dropped_when_a_waiting_context_is_released_or_claimed() -> None:
    manager = kv_manager(8)
    manager.claim(text_context(PROMPT))
    cancelled_context, claimed_context = text_context(PROMPT), text_context(PROMPT)
    for context in (cancelled_context, claimed_context):
        assert manager.waits_for(context)
    assert len(manager._prefixes._chains) == 2
    manager.release(cancelled_context)
    manager.claim(claimed_context)
    assert not manager._prefixes._chains


def test_waits_for_continues_from_the_last_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = kv_manager(300, block_size=1)
    first_context, waiting_context = text_context(list(range(201))), text_context(list(range(201)))
    run_one_step(manager, first_context, chunk=200)
    manager.claim(third_context := text_context([*range(200), 7, 8, 9]))
    assert third_context.start_idx == 200
    lookups: list[bytes] = []
    pool = manager._pools[0]
    lookup = pool.lookup
    monkeypatch.setattr(pool, "lookup", lambda digest: lookups.append(digest) or lookup(digest))
    manager.waits_for(waiting_context)
    assert len(lookups) == 200
    lookups.clear()
    manager.waits_for(waiting_context)
    assert len(lookups) == 1


def test_admits_counts_shared_and_evictable_blocks() -> None:
    manager = kv_manager(5)
    first_context = text_context(PROMPT)
    run_one_step(manager, first_context, 50)  # three blocks, two of them registered
    assert manager.admits(text_context(PROMPT))  # shares two blocks, needs one
    assert manager.admits(text_context(PROMPT), headroom=1)
    assert not manager.admits(text_context(PROMPT), headroom=2)
    assert not manager.admits(text_context(PROMPT[::-1]))  # needs three blocks, two are free
    manager.release(first_context)
    assert manager.admits(text_context(PROMPT), headroom=2)
    assert not manager.admits(text_context(PROMPT), headroom=3)


def test_admits_and_fits_count_only_blocks_within_windows() -> None:
    manager = kv_manager(20, 4, windows=(None, 6))
    context = text_context(list(range(40)))
    assert manager.fits(40, chunk_size=4)
    assert manager.admits(context, chunk_size=4)
    for fits in (manager.fits(40, chunk_size=16), manager.fits(40), manager.fits(84, chunk_size=1)):
        assert not fits
    assert not manager.admits(context, chunk_size=16)
    assert manager.fits(16)


# -- inputs and storage -------------------------------------------------------------------------------


def test_inputs_describe_a_ragged_batch() -> None:
    manager = kv_manager(8)
    prefill, decode = text_context(PROMPT), text_context([7, 8, 9])
    run_one_step(manager, decode, 60)
    manager.claim(prefill)
    prefill.set_token_indices(active_idx=6)
    for context in (prefill, decode):
        manager.reserve(context)
    inputs = manager.inputs([decode, prefill])
    (group,) = inputs.groups
    assert inputs.lengths.tolist() == [4, 6]
    assert inputs.lengths.dtype == group.block_tables.dtype == torch.int32
    assert group.block_tables.tolist() == [[1, 0], [2, 3]]
    assert group.slots.tolist() == [4 + 3, 8, 9, 10, 11, 12, 13]
    assert group.slots.dtype == torch.int64
    assert group.block_tables.is_contiguous()
    assert (inputs.block_size, inputs.group_of_layer) == (4, (0,))


def test_inputs_include_drafts_and_advance_to_the_next_step() -> None:
    manager, context = kv_manager(8), text_context(PROMPT)
    run_one_step(manager, context, 50)
    manager.reserve(context, lookahead=3)
    inputs = manager.inputs([context], np.array([10]), np.array([3]))
    assert inputs.lengths.tolist() == [13]
    assert inputs.groups[0].slots.tolist() == [14, 15, 16]
    next_inputs = inputs.advance()
    assert next_inputs.lengths.tolist() == [14]
    assert next_inputs.groups[0].slots.tolist() == [17]


def test_an_empty_batch_has_empty_inputs() -> None:
    inputs = kv_manager(8).inputs([])
    assert (tuple(inputs.groups[0].block_tables.shape), inputs.lengths.tolist()) == ((0, 1), [])


def test_inputs_do_not_change_after_a_release() -> None:
    manager, context = kv_manager(8), text_context(PROMPT)
    manager.claim(context)
    manager.reserve(context)
    inputs = manager.inputs([context])
    manager.release(context)
    assert inputs.groups[0].block_tables.tolist() == [[1, 2, 3]]


def test_storage_has_the_shapes_of_the_spec_and_copies_blocks() -> None:
    spec = KVCacheSpec((KVGroup((0, 2), 2, 8, DType.bfloat16), KVGroup((1,), 1, 4, DType.int8, window=4)))
    storage = KVCacheStorage(spec, (5, 3), 16, torch.device("cpu"))
    assert [tuple(cache.shape) for cache in storage.caches] == [
        (2, 5, 2, 16, 8),
        (2, 3, 1, 16, 4),
        (2, 5, 2, 16, 8),
    ]
    assert [cache.dtype for cache in storage.caches] == [torch.bfloat16, torch.int8, torch.bfloat16]
    assert storage.scales[0] is None
    scales = storage.scales[1]
    assert scales is not None
    assert (tuple(scales.shape), scales.dtype) == ((2, 3, 1, 16), torch.float32)
    assert not any(cache.any() for cache in storage.caches)
    storage.caches[1][:, 2] = 3
    scales[:, 2] = 0.5
    storage.copy_block(1, 2, 1)
    assert storage.caches[1][:, 1].eq(3).all()
    assert scales[:, 1].eq(0.5).all()
    assert not storage.caches[1][:, 0].any()


def test_an_int8_cache_has_its_scales_in_the_inputs() -> None:
    spec = KVCacheSpec((KVGroup((0,), 1, 4, DType.int8),))
    manager, context = KVCacheManager(spec, (5,), 4), text_context(PROMPT)
    manager.claim(context)
    manager.reserve(context)
    layer = manager.inputs([context]).layer(0)
    assert layer.scales is manager.storage.scales[0]
    assert layer.scales is not None


# -- check_integrity ----------------------------------------------------------------------------------


def test_check_integrity_reports_a_surplus_reference() -> None:
    manager, context = kv_manager(8), text_context(PROMPT)
    manager.claim(context)
    manager.reserve(context)
    manager._pools[0].retain([2])
    with pytest.raises(AssertionError, match="group 0: block 2 has 2 references and is in 1 tables"):
        manager.check_integrity()


def test_check_integrity_reports_a_hole_in_a_table() -> None:
    manager, context = kv_manager(8), text_context(PROMPT)
    manager.claim(context)
    manager.reserve(context)
    manager._tables.row(0, 0)[1] = 0
    with pytest.raises(AssertionError, match=r"group 0: table \[1, 0, 3"):
        manager.check_integrity()


def test_a_batch_of_contexts_is_computed_in_one_forward() -> None:
    manager = kv_manager(40)
    contexts = [text_context([n, *PROMPT[: n + 1]]) for n in range(6)]
    for context in contexts:
        manager.claim(context)
    for token in range(8):
        for context in contexts:
            manager.reserve(context)
        store_and_check_keys(manager, contexts)
        for context in contexts:
            context.update(token)
            manager.commit(context)
    manager.check_integrity()


def test_cached_blocks_are_counted() -> None:
    manager, context = kv_manager(8), text_context(PROMPT[:10])
    run_one_step(manager, context)
    assert (manager.num_free_blocks, manager.num_cached_blocks) == (5, 0)
    manager.release(context)
    assert (manager.num_free_blocks, manager.num_cached_blocks) == (8, 2)
