"""The memory planner: plans fit into the free memory, and errors suggest values that fit."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console

from penstock.config import KVCacheConfig, ModelConfig, PipelineConfig, parse_devices
from penstock.dtype import DType
from penstock.errors import ConfigError, InsufficientMemoryError
from penstock.kernels import BACKENDS
from penstock.kv_cache.spec import KVCacheSpec, KVGroup
from penstock.memory import (
    MemoryPlan,
    estimate_kv_cache_size,
    plan_memory,
)
from penstock.memory.demand import requested_block_size, requested_step_tokens
from penstock.memory.plan import MIN_STEP_TOKENS
from penstock.memory.refusals import format_bytes

FULL_ATTENTION = KVCacheSpec((KVGroup((0, 1), 2, 4, DType.float32),))  # 128 bytes per token
BYTES_PER_TOKEN = 128
BYTES_PER_BLOCK = 32 * BYTES_PER_TOKEN

SPECS = {
    "full": FULL_ATTENTION,
    "windowed": KVCacheSpec((KVGroup((0,), 2, 4, DType.float32, window=50),)),
    "mixed": KVCacheSpec(
        (KVGroup((0, 2), 2, 4, DType.bfloat16), KVGroup((1, 3, 4), 1, 8, DType.float32, window=70))
    ),
}

configs = st.builds(
    lambda max_length, max_batch_size, step_tokens, is_chunked, num_steps, block_size, utilization: (
        PipelineConfig(
            model=ModelConfig(max_length=max_length),
            kv_cache=KVCacheConfig(block_size=block_size, device_memory_utilization=utilization),
            max_batch_size=max_batch_size,
            max_batch_input_tokens=step_tokens,
            enable_chunked_prefill=is_chunked,
            max_num_steps=num_steps,
        )
    ),
    max_length=st.none() | st.integers(1, 2000),
    max_batch_size=st.none() | st.integers(1, 200),
    step_tokens=st.integers(1, 9000),
    is_chunked=st.booleans(),
    num_steps=st.integers(1, 10),
    block_size=st.sampled_from([16, 32, 64, 128]),
    utilization=st.floats(0.1, 1),
)
specs = st.sampled_from(list(SPECS.values()))
weights = st.integers(0, 100_000)
activations = st.integers(0, 300_000)
memories = st.integers(0, 2_000_000)
lengths = st.integers(2000, 5000)

DEFAULT_STEP_SIZE = BACKENDS.default_sizes("cpu").step_tokens


def make_plan(
    config: PipelineConfig | None = None,
    spec: KVCacheSpec | None = FULL_ATTENTION,
    *,
    length: int = 1000,
    weights: int = 0,
    activations: int = 0,
    free: int,
) -> MemoryPlan:
    return plan_memory(
        config or PipelineConfig(kv_cache=KVCacheConfig(device_memory_utilization=1.0)),
        spec,
        model_max_length=length,
        weights_size=weights,
        activation_size=activations,
        free_memory=free,
    )


def make_config(
    max_length: int | None = None, max_batch_size: int | None = None, **kv_cache: Any
) -> PipelineConfig:
    return PipelineConfig(
        model=ModelConfig(max_length=max_length),
        kv_cache=KVCacheConfig(**{"device_memory_utilization": 1.0, **kv_cache}),
        max_batch_size=max_batch_size,
    )


def max_blocks_used(group: KVGroup, config: PipelineConfig, length: int, rows: int) -> int:
    """Return the maximum number of blocks of a simulated sequence that computes ``rows`` tokens per step."""
    block_size, max_blocks = requested_block_size(config), 0
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        max_blocks = max(max_blocks, (stop - 1) // block_size - group.first_visible(start) // block_size + 1)
    return max_blocks


def assert_usable(plan: MemoryPlan, config: PipelineConfig, spec: KVCacheSpec) -> None:
    """Check that one sequence of maximum length fits, and that a full batch can have a block per sequence."""
    rows = plan.max_batch_input_tokens if config.enable_chunked_prefill else plan.max_length
    for group, count in zip(spec.groups, plan.num_blocks, strict=True):
        assert count - 1 >= max_blocks_used(group, config, plan.max_length, rows)
        assert count - 1 >= plan.max_batch_size


@given(config=configs, spec=specs, length=lengths, weights=weights, activations=activations, free=memories)
def test_a_plan_fits_the_memory_and_is_usable(
    config: PipelineConfig, spec: KVCacheSpec, length: int, weights: int, activations: int, free: int
) -> None:
    try:
        plan = make_plan(config, spec, length=length, weights=weights, activations=activations, free=free)
    except InsufficientMemoryError:
        return
    used_memory = plan.weights_size + plan.activation_size + plan.kv_cache_size
    assert used_memory <= plan.available_memory <= free
    assert plan.available_memory == int(free * config.kv_cache.device_memory_utilization)
    bytes_per_block = spec.bytes_per_block(plan.block_size)
    assert plan.kv_cache_size == sum(
        count * size for count, size in zip(plan.num_blocks, bytes_per_block, strict=True)
    )
    assert_usable(plan, config, spec)


@given(config=configs, spec=specs, length=lengths, free=st.integers(200_000, 5_000_000))
def test_configured_sizes_are_kept_and_others_do_not_exceed_the_defaults(
    config: PipelineConfig, spec: KVCacheSpec, length: int, free: int
) -> None:
    try:
        plan = make_plan(config, spec, length=length, free=free)
    except InsufficientMemoryError:
        return
    assert plan.max_length == config.model.max_length or config.model.max_length is None
    assert plan.max_batch_size == config.max_batch_size or config.max_batch_size is None
    assert 1 <= plan.max_length <= length
    assert 1 <= plan.max_batch_size <= max(32, config.max_batch_size or 0)
    for group, count in zip(spec.groups, plan.num_blocks, strict=True):
        full_length_blocks = group.max_blocks(plan.max_length, plan.block_size)
        assert count - 1 <= plan.max_batch_size * full_length_blocks


@given(
    config=configs,
    spec=specs,
    length=lengths,
    weights=weights,
    activations=activations,
    free=st.integers(300_000, 3_000_000),
    extra_memory=st.integers(0, 1_000_000),
)
def test_more_memory_never_reduces_the_length_or_the_step_size(
    config: PipelineConfig,
    spec: KVCacheSpec,
    length: int,
    weights: int,
    activations: int,
    free: int,
    extra_memory: int,
) -> None:
    sizes = {"length": length, "weights": weights, "activations": activations}
    try:
        smaller_plan = make_plan(config, spec, free=free, **sizes)
    except InsufficientMemoryError:
        return
    assume(smaller_plan.max_batch_input_tokens >= min(MIN_STEP_TOKENS, requested_step_tokens(config)))
    larger_plan = make_plan(config, spec, free=free + extra_memory, **sizes)
    assert larger_plan.max_length >= smaller_plan.max_length
    assert larger_plan.max_batch_input_tokens >= smaller_plan.max_batch_input_tokens


@given(spec=specs, length=st.integers(1, 3000), batch=st.integers(1, 50), free=st.integers(1, 500_000))
def test_a_shortened_length_is_the_maximum_that_fits(
    spec: KVCacheSpec, length: int, batch: int, free: int
) -> None:
    config = replace(make_config(max_batch_size=batch), max_batch_input_tokens=64)
    try:
        plan = make_plan(config, spec, length=length, free=free)
    except InsufficientMemoryError:
        with pytest.raises(InsufficientMemoryError):
            make_plan(replace(config, model=ModelConfig(max_length=1)), spec, length=length, free=free)
        return
    if plan.is_shortened:
        longer_config = replace(config, model=ModelConfig(max_length=plan.max_length + 1))
        with pytest.raises(InsufficientMemoryError):
            make_plan(longer_config, spec, length=length, free=free)
    else:
        assert plan.max_length == length


@given(config=configs, spec=specs, length=lengths, activations=activations, free=st.integers(3000, 100_000))
def test_a_suggested_length_and_batch_size_fit(
    config: PipelineConfig, spec: KVCacheSpec, length: int, activations: int, free: int
) -> None:
    try:
        make_plan(config, spec, length=length, activations=activations, free=free)
    except InsufficientMemoryError as error:
        message = str(error)
    else:
        return
    if "try --max-" not in message:  # no length and no batch size would fit
        return
    settings = dict(re.findall(r"--(max-\S+) (\d+)", message))
    assert ("max-length" in settings) == (config.model.max_length is not None)
    assert ("max-batch-size" in settings) == (config.max_batch_size is not None)
    if "max-length" in settings:
        config = replace(config, model=ModelConfig(max_length=int(settings["max-length"])))
    if "max-batch-size" in settings:
        config = replace(config, max_batch_size=int(settings["max-batch-size"]))
    make_plan(config, spec, length=length, activations=activations, free=free)


def test_every_sequence_of_the_batch_fits_if_memory_suffices() -> None:
    plan = make_plan(length=1000, free=10**9)
    assert (plan.max_length, plan.max_batch_size) == (1000, 32)
    assert plan.num_blocks == (32 * 32 + 1,)  # 32 blocks of 32 tokens hold 1000 tokens, plus the null block
    assert plan.num_cache_tokens == 32 * 1024
    assert plan.kv_cache_size == 1025 * BYTES_PER_BLOCK


def test_a_gpu_has_a_larger_default_batch_size() -> None:
    config = PipelineConfig(model=ModelConfig(devices=parse_devices("gpu")))
    assert make_plan(config, free=10**9).max_batch_size == 256
    assert make_plan(replace(config, max_batch_input_tokens=100), free=10**9).max_batch_size == 100


def test_the_length_is_reduced_to_whole_blocks() -> None:
    plan = make_plan(length=1000, free=10 * BYTES_PER_BLOCK + 5)
    assert (plan.max_length, plan.num_blocks) == (9 * 32, (10,))
    assert plan.is_shortened
    assert plan.max_batch_size == 9


def test_a_window_needs_the_same_memory_for_longer_sequences() -> None:
    spec, config = SPECS["windowed"], replace(make_config(max_batch_size=1), max_batch_input_tokens=32)
    short_plan, long_plan = (make_plan(config, spec, length=length, free=10**9) for length in (1000, 100_000))
    assert short_plan.num_blocks == long_plan.num_blocks == (5,)  # 49 + 32 tokens lie in at most 4 blocks
    assert long_plan.max_length == 100_000


@given(
    window=st.integers(1, 200),
    block_size=st.sampled_from([16, 32, 64]),
    rows=st.lists(st.integers(1, 300), min_size=1, max_size=6),
)
def test_with_enough_memory_all_windows_fit_with_a_full_step(
    window: int, block_size: int, rows: list[int]
) -> None:
    group = KVGroup((0,), 1, 1, DType.float32, window=window)
    config = replace(
        make_config(max_batch_size=len(rows), block_size=block_size), max_batch_input_tokens=sum(rows)
    )
    plan = make_plan(config, KVCacheSpec((group,)), length=2000, free=10**9)
    used_blocks = sum(max_blocks_used(group, config, 2000, count) for count in rows)
    assert plan.num_blocks[0] - 1 >= used_blocks


def test_a_windowed_group_has_fewer_blocks_than_a_full_group() -> None:
    plan = make_plan(
        replace(make_config(max_batch_size=2), max_batch_input_tokens=64), SPECS["mixed"], free=10**9
    )
    full_blocks, windowed_blocks = plan.num_blocks
    assert full_blocks == 2 * 32 + 1
    assert windowed_blocks < full_blocks


def test_a_configured_batch_size_fits_with_its_windows() -> None:
    spec, config = SPECS["mixed"], replace(make_config(max_batch_size=30), max_batch_input_tokens=64)
    window_bytes = 31 * spec.bytes_per_block(32)[1]
    plan = make_plan(config, spec, length=3000, free=window_bytes + 51 * spec.bytes_per_block(32)[0])
    assert (plan.max_length, plan.num_blocks) == (50 * 32, (51, 31))


def test_the_suggested_length_and_batch_size_fit_together() -> None:
    spec, config = SPECS["mixed"], replace(make_config(1600, 30), max_batch_input_tokens=64)
    full_block_bytes, windowed_block_bytes = spec.bytes_per_block(32)
    with pytest.raises(InsufficientMemoryError, match=r"try --max-length 1600 --max-batch-size 20$"):
        make_plan(config, spec, length=3000, free=51 * full_block_bytes + 21 * windowed_block_bytes)


def test_a_model_without_a_cache_needs_no_blocks() -> None:
    plan = make_plan(spec=None, weights=10, activations=20, free=100)
    assert (plan.num_blocks, plan.kv_cache_size, plan.num_cache_tokens) == ((), 0, 0)
    assert (plan.max_length, plan.max_batch_size) == (1000, 32)


def test_the_step_size_is_reduced_before_the_length() -> None:
    full_sequence_bytes = 33 * BYTES_PER_BLOCK  # one sequence of 1000 tokens, plus the null block
    config = replace(make_config(), max_batch_input_tokens=4096)
    plan = make_plan(config, activations=4096, weights=50, free=full_sequence_bytes + 50 + 1500)
    assert (plan.max_batch_input_tokens, plan.activation_size, plan.max_length) == (1024, 1024, 1000)
    plan = make_plan(config, activations=4096, free=4 * BYTES_PER_BLOCK + 512)
    assert (plan.max_batch_input_tokens, plan.activation_size, plan.max_length) == (512, 512, 96)


def test_the_step_size_is_reduced_below_512_if_the_model_does_not_fit_otherwise() -> None:
    size = DEFAULT_STEP_SIZE * 100
    plan = make_plan(activations=size, length=32, free=64 * 100 + 2 * BYTES_PER_BLOCK)
    assert (plan.max_batch_input_tokens, plan.max_length) == (64, 32)
    with pytest.raises(InsufficientMemoryError, match="activations 100 bytes"):
        make_plan(activations=size, length=32, free=99)


def test_the_step_size_is_at_least_the_batch_size() -> None:
    plan = make_plan(PipelineConfig(max_batch_size=2000), length=16, free=10**8)
    assert (plan.max_batch_size, plan.max_batch_input_tokens) == (2000, 2000)
    config = PipelineConfig(max_batch_size=2000, max_batch_input_tokens=3000)
    assert make_plan(config, length=16, free=10**8).max_batch_input_tokens == 3000
    assert make_plan(free=10**8).max_batch_input_tokens == DEFAULT_STEP_SIZE


def test_the_error_names_a_configured_batch_size() -> None:
    with pytest.raises(InsufficientMemoryError, match=r"lower --max-batch-input-tokens or --max-batch-size$"):
        make_plan(PipelineConfig(max_batch_size=10**8), activations=10**9, weights=10**9, free=10**6)


def test_the_step_size_is_kept_if_prompts_cannot_be_chunked() -> None:
    config = replace(make_config(), max_batch_input_tokens=4096, enable_chunked_prefill=False)
    assert make_plan(config, activations=4096, free=4 * BYTES_PER_BLOCK + 4096).max_batch_input_tokens == 4096


def test_kv_cache_memory_is_used_exactly() -> None:
    plan = make_plan(
        make_config(memory=10 * BYTES_PER_BLOCK, device_memory_utilization=0.1),
        weights=100,
        free=20 * BYTES_PER_BLOCK,
    )
    assert plan.kv_cache_size == 10 * BYTES_PER_BLOCK
    assert plan.available_memory == 10 * BYTES_PER_BLOCK + 100
    with pytest.raises(InsufficientMemoryError, match=r"the KV cache 40.0 KiB, .*: lower --kv-cache-memory"):
        make_plan(make_config(memory=10 * BYTES_PER_BLOCK), weights=100, free=10 * BYTES_PER_BLOCK)


def test_a_length_above_the_maximum_of_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_length"):
        make_plan(make_config(max_length=1001), length=1000, free=10**9)


@pytest.mark.parametrize(
    ("max_length", "max_batch_size", "advice"),
    [
        (1000, None, "for max_length 1000, .*: try --max-length 288$"),
        (None, 50, "for max_batch_size 50, .*: try --max-batch-size 9$"),
        (1000, 50, "for max_length 1000 and max_batch_size 50, .*: try --max-length 288 --max-batch-size 9$"),
        (100, 50, ": try --max-length 100 --max-batch-size 9$"),
    ],
)
def test_the_error_names_only_configured_values(
    max_length: int | None, max_batch_size: int | None, advice: str
) -> None:
    with pytest.raises(InsufficientMemoryError, match=advice):
        make_plan(make_config(max_length, max_batch_size), length=1000, free=10 * BYTES_PER_BLOCK)


def test_memory_for_less_than_a_block_is_an_error() -> None:
    with pytest.raises(
        InsufficientMemoryError, match=r"for one block, .*: raise --device-memory-utilization"
    ):
        make_plan(free=2 * BYTES_PER_BLOCK - 1)
    assert make_plan(free=2 * BYTES_PER_BLOCK).max_length == 32


def test_weights_larger_than_the_memory_are_an_error() -> None:
    with pytest.raises(InsufficientMemoryError, match=r"weights take 2.0 GiB.* use a smaller model") as error:
        make_plan(weights=2**31, free=2**30)
    assert (error.value.needed, error.value.available) == (2**31, 2**30)
    with pytest.raises(InsufficientMemoryError, match="raise --device-memory-utilization"):
        make_plan(make_config(device_memory_utilization=0.5), weights=600, free=1000)


def render_table(plan: MemoryPlan) -> str:
    console = Console(width=100, record=True, file=StringIO())
    console.print(plan.table())
    return console.export_text()


def test_the_table_shows_reduced_values() -> None:
    text = render_table(make_plan(length=1000, weights=5 * 2**20, free=10 * BYTES_PER_BLOCK + 5 * 2**20))
    for words in (
        "weights",
        "5.0 MiB",
        "activations",
        "40.0 KiB for 288 tokens",
        "288 tokens, shortened from 1,000",
    ):
        assert words in text
    assert "9 requests" in text


def test_sizes_are_formatted_with_units() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 1536, 5 * 2**20, 2**30, 2**41)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1.5 KiB",
        "5.0 MiB",
        "1.0 GiB",
        "2.0 TiB",
    ]


def test_the_estimated_cache_size_equals_the_plan() -> None:
    config = make_config(max_batch_size=4)
    for available in (5 * BYTES_PER_BLOCK + 7, 50 * BYTES_PER_BLOCK, 10**9):
        size = estimate_kv_cache_size(
            config, FULL_ATTENTION, model_max_length=1000, available_cache_memory=available
        )
        assert size == make_plan(config, free=available).kv_cache_size
    with pytest.raises(InsufficientMemoryError):
        estimate_kv_cache_size(
            config, FULL_ATTENTION, model_max_length=1000, available_cache_memory=5 * BYTES_PER_BLOCK - 1
        )
    assert estimate_kv_cache_size(config, None, model_max_length=9, available_cache_memory=9) == 0


def test_memory_for_adapters_reduces_the_cache() -> None:
    config = make_config()
    options = {"model_max_length": 100_000, "weights_size": 1000, "activation_size": 0, "free_memory": 2**20}
    plan_without_adapters, plan_with_adapters = (
        plan_memory(config, FULL_ATTENTION, **options),
        plan_memory(config, FULL_ATTENTION, **options, adapters_size=2**19),
    )
    assert plan_with_adapters.kv_cache_size <= plan_without_adapters.kv_cache_size - 2**19 + 2**14
    assert plan_with_adapters.adapters_size == 2**19
    assert "512.0 KiB" in render_table(plan_with_adapters)
    assert "adapters" not in render_table(plan_without_adapters)
    with pytest.raises(InsufficientMemoryError, match=r"LoRA adapters 2.0 MiB.*lower --max-loras"):
        plan_memory(config, FULL_ATTENTION, **options, adapters_size=2**21)


def test_inputs_that_cannot_be_split_need_memory_for_the_longest_input() -> None:
    options: dict[str, Any] = {"model_max_length": 4096, "weights_size": 1000, "min_step_tokens": 4096}
    config = replace(make_config(), max_batch_input_tokens=1024)
    plan = plan_memory(config, None, **options, activation_size=4096, free_memory=6000)
    assert (plan.max_batch_input_tokens, plan.activation_size) == (1024, 4096)
    config = replace(make_config(), max_batch_input_tokens=16384)
    halved_plan = plan_memory(config, None, **options, activation_size=16384, free_memory=10_000)
    assert (halved_plan.max_batch_input_tokens, halved_plan.activation_size) == (8192, 8192)
    with pytest.raises(InsufficientMemoryError, match=r"activations 4\.0 KiB"):
        plan_memory(config, None, **options, activation_size=16384, free_memory=5000)
