"""Offloading of evicted prefix-cache blocks to host memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_pipeline import FakePipeline, expected_output_tokens
from support.kv_contexts import kv_manager, run_one_step, store_and_check_keys, text_context
from support.random_draws import num_examples

from penstock.config import KVCacheConfig, ModelConfig, PipelineConfig, parse_devices
from penstock.errors import ConfigError
from penstock.kv_cache import KVCacheManager
from penstock.kv_cache.host_blocks import HostBlocks
from penstock.pipelines.core import TextContext, TextGenerationResponse
from penstock.scheduler import Scheduler

BLOCK_BYTES = 2 * 4 * 4
"""Bytes of a block of `kv_manager`: keys and values of 4 tokens in float32."""


def host_blocks(manager: KVCacheManager) -> HostBlocks:
    host = manager._prefixes.host
    assert host is not None
    return host


def count_cached_tokens(manager: KVCacheManager, tokens: list[int], **fields: Any) -> int:
    """Compute a prompt, release it and check the cache. Return how many tokens of the prompt were cached."""
    context = text_context(tokens, **fields)
    run_one_step(manager, context)
    manager.release(context)
    manager.check_integrity()
    return context.num_cached_tokens


def test_an_evicted_prefix_is_restored() -> None:
    first_prompt, second_prompt = list(range(17)), list(range(100, 117))
    manager_without_host_memory = kv_manager(5)
    assert [
        count_cached_tokens(manager_without_host_memory, tokens)
        for tokens in (first_prompt, second_prompt, first_prompt)
    ] == [
        0,
        0,
        0,
    ]
    manager = kv_manager(5, host_memory=8 * BLOCK_BYTES)
    assert host_blocks(manager).num_blocks == 8
    assert [
        count_cached_tokens(manager, tokens)
        for tokens in (first_prompt, second_prompt, first_prompt, second_prompt, first_prompt)
    ] == [
        0,
        0,
        16,
        16,
        16,
    ]
    assert host_blocks(manager).num_restored >= 4


def test_host_memory_for_two_blocks_restores_at_most_two_blocks() -> None:
    first_prompt, second_prompt = list(range(17)), list(range(100, 117))
    manager = kv_manager(5, host_memory=2 * BLOCK_BYTES)
    count_cached_tokens(manager, first_prompt)
    count_cached_tokens(manager, second_prompt)
    assert count_cached_tokens(manager, first_prompt) == 8
    assert host_blocks(manager).num_blocks == 2


def test_the_check_of_keys_detects_a_changed_host_block() -> None:
    """The other tests rely on `store_and_check_keys` to detect a wrong copy of a restored block."""
    first_prompt, second_prompt = list(range(17)), list(range(100, 117))
    manager = kv_manager(5, host_memory=8 * BLOCK_BYTES)
    count_cached_tokens(manager, first_prompt)
    count_cached_tokens(manager, second_prompt)
    for tensors in host_blocks(manager)._host_tensors:
        for tensor in tensors:
            tensor.add_(1)
    context = text_context(first_prompt)
    manager.claim(context)
    manager.reserve(context)
    assert context.num_cached_tokens == 16
    with pytest.raises(AssertionError):
        store_and_check_keys(manager, [context])


def test_prefixes_are_not_restored_after_a_reset() -> None:
    first_prompt, second_prompt = list(range(17)), list(range(100, 117))
    manager = kv_manager(5, host_memory=8 * BLOCK_BYTES)
    count_cached_tokens(manager, first_prompt)
    count_cached_tokens(manager, second_prompt)
    manager.forget_prefixes()
    assert count_cached_tokens(manager, first_prompt) == 0


def test_blocks_of_another_salt_and_echoed_prompts_are_not_restored() -> None:
    """The salt is part of the identity of a block. A request with echo reads no cached block."""
    first_prompt, second_prompt = list(range(17)), list(range(100, 117))
    manager = kv_manager(5, host_memory=8 * BLOCK_BYTES)
    count_cached_tokens(manager, first_prompt, cache_salt="a")
    count_cached_tokens(manager, second_prompt)
    assert count_cached_tokens(manager, first_prompt, cache_salt="b") == 0
    assert count_cached_tokens(manager, first_prompt, cache_salt="a") == 16
    count_cached_tokens(manager, second_prompt)
    assert (
        count_cached_tokens(
            manager, first_prompt, cache_salt="a", log_probabilities=1, log_probabilities_echo=True
        )
        == 0
    )


@settings(max_examples=num_examples(25))
@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 8)), min_size=2, max_size=12
    ),
    num_host_blocks=st.integers(1, 20),
    num_blocks=st.integers(11, 14),
    windows=st.sampled_from([(None,), (None, 6), (8,)]),
    batch_size=st.integers(1, 4),
)
def test_any_schedule_gives_the_outputs_of_single_requests(
    prompts: list[tuple[int, int, int]],
    num_host_blocks: int,
    num_blocks: int,
    windows: tuple[int | None, ...],
    batch_size: int,
) -> None:
    """Each prompt repeats one of four tokens. Each step checks the keys of its contexts."""
    memory = num_host_blocks * BLOCK_BYTES * len(windows)
    kv = kv_manager(*[num_blocks] * len(windows), windows=windows, host_memory=memory)
    scheduler: Scheduler[TextContext, TextGenerationResponse] = Scheduler(
        FakePipeline(kv), max_batch_size=batch_size, max_batch_input_tokens=16, min_chunk_size=4
    )
    contexts = [
        text_context([prefix_token] * length, max_length=length + max_new_tokens, request_id=str(number))
        for number, (prefix_token, length, max_new_tokens) in enumerate(prompts)
    ]
    expected = {context.request_id: expected_output_tokens(context) for context in contexts}
    generated: dict[str, list[int]] = {name: [] for name in expected}
    for context in contexts:
        scheduler.submit(context)
    while scheduler.has_work:
        for name, output in scheduler.step().items():
            generated[name] += [int(token.next_token) for token in output.tokens]
        kv.check_integrity()
    assert generated == expected


def test_kv_offload_is_refused_without_a_gpu() -> None:
    cache = KVCacheConfig(offload_memory=1 << 20)
    with pytest.raises(ConfigError, match="kv_offload_memory: the KV cache of a CPU is in host memory"):
        PipelineConfig(kv_cache=cache)
    PipelineConfig(kv_cache=cache, model=ModelConfig(devices=parse_devices("gpu")))
