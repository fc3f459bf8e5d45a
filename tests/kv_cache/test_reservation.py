"""`reserve_steps`, `reserve_drafts` and `claim`: numbers of steps and drafts, blocks, stale contexts."""

from __future__ import annotations

from typing import Any

import pytest
from support.kv_contexts import kv_manager, text_context

from penstock.errors import InsufficientBlocksError
from penstock.kv_cache import KVCacheManager, NullKVCache, claim, reserve_drafts, reserve_steps, tokens_left
from penstock.pipelines.core import SamplingParams, TextContext


def claimed_context(manager: KVCacheManager, length: int = 4, **fields: Any) -> TextContext:
    context = text_context([1] * length, **fields)
    manager.claim(context)
    return context


@pytest.mark.parametrize(("num_steps", "num_blocks"), [(1, 1), (2, 2), (5, 2), (6, 3)])
def test_blocks_for_all_steps_are_reserved(num_steps: int, num_blocks: int) -> None:
    manager = kv_manager(10)
    assert reserve_steps(manager, [claimed_context(manager)], num_steps) == num_steps
    assert manager.num_blocks - manager.num_free_blocks == num_blocks


@pytest.mark.parametrize(
    "fields",
    [
        {"log_probabilities": 1},
        {"sampling_params": SamplingParams(repetition_penalty=1.5)},
        {"sampling_params": SamplingParams(banned_sequences=[[1, 2]])},
    ],
)
def test_one_step_is_reserved_if_a_context_needs_the_host_after_each_token(fields: dict[str, Any]) -> None:
    manager = kv_manager(10)
    contexts = [claimed_context(manager), claimed_context(manager, **fields)]
    assert reserve_steps(manager, contexts, 5) == 1
    assert manager.num_free_blocks == 8


def test_one_step_is_reserved_for_a_prompt_chunk() -> None:
    manager = kv_manager(10)
    context = claimed_context(manager)
    context.set_token_indices(active_idx=2)
    assert reserve_steps(manager, [context], 5) == 1


def test_reserved_steps_do_not_exceed_the_remaining_tokens() -> None:
    manager = kv_manager(10)
    assert reserve_steps(manager, [claimed_context(manager), claimed_context(manager, max_length=7)], 5) == 3
    manager.max_length = 6
    assert reserve_steps(manager, [claimed_context(manager)], 5) == 2
    manager.max_length = 4
    assert reserve_steps(manager, [claimed_context(manager)], 5) == 1, (
        "the result is at least 1, although the context has reached the maximum length"
    )


def test_reserved_steps_end_at_the_key_limit() -> None:
    manager = kv_manager(10, key_limits=(6,))
    assert reserve_steps(manager, [claimed_context(manager)], 9) == 3
    assert tokens_left(manager, claimed_context(manager)) == 3


def test_one_step_is_reserved_if_there_are_too_few_blocks_for_several() -> None:
    manager = kv_manager(3)
    contexts = [claimed_context(manager), claimed_context(manager)]
    assert reserve_steps(manager, contexts, 5) == 1
    assert manager.num_free_blocks == 1
    assert reserve_steps(manager, contexts[:1], 5) == 5


def test_too_few_blocks_for_one_step_raise_an_error() -> None:
    manager = kv_manager(1)
    contexts = [claimed_context(manager), claimed_context(manager)]
    with pytest.raises(InsufficientBlocksError):
        reserve_steps(manager, contexts, 5)


@pytest.mark.parametrize(("num_drafts", "num_reserved"), [(0, 0), (4, 4), (9, 4), (20, 2)])
def test_drafts_are_halved_until_their_blocks_are_free(num_drafts: int, num_reserved: int) -> None:
    manager = kv_manager(2)
    context = claimed_context(manager)
    manager.reserve(context)
    assert reserve_drafts(manager, context, num_drafts) == num_reserved


def test_reservations_without_a_cache_depend_on_the_length_only() -> None:
    cache, context = NullKVCache(), text_context([1, 2, 3], max_length=10)
    assert reserve_steps(cache, [context], 20) == 7
    cache.max_length = 5
    assert reserve_steps(cache, [context], 20) == 2


def test_a_claim_restarts_a_stale_context() -> None:
    manager = kv_manager(10, key_limits=(5,))
    context = claimed_context(manager)
    manager.reserve(context)
    context.update(1)
    context.update(1)
    assert manager.is_stale(context)
    claim(manager, context)
    assert not manager.is_stale(context)
    assert (context.start_idx, context.active_idx) == (0, 6)
