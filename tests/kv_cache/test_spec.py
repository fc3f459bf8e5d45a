"""The specification of a KV cache: groups of layers, sizes, windows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dtype import DType
from penstock.errors import ConfigError
from penstock.kv_cache.spec import KVCacheSpec, KVGroup


def make_group(*layers: int, window: int | None = None, dtype: DType = DType.float32) -> KVGroup:
    return KVGroup(layers, 2, 8, dtype, window)


def test_a_layer_maps_to_its_group() -> None:
    spec = KVCacheSpec((make_group(0, 3), make_group(1, 2, window=16)))
    assert spec.num_layers == 4
    assert spec.group_of_layer == (0, 1, 1, 0)


def test_bytes_per_block_depend_on_heads_head_dim_and_dtype() -> None:
    spec = KVCacheSpec(
        (make_group(0, 1), make_group(2, dtype=DType.bfloat16), make_group(3, dtype=DType.int8))
    )
    rows_per_layer = 2 * 2 * 16  # keys and values, kv heads, tokens of a block
    assert spec.bytes_per_block(16) == (
        2 * rows_per_layer * 8 * 4,
        rows_per_layer * 8 * 2,
        rows_per_layer * (8 + 4),
    )


@pytest.mark.parametrize("layers", [[(0, 2)], [(0,), (0,)], [(1,)], [(0, 1), (1, 2)]])
def test_layers_that_are_missing_or_repeated_are_refused(layers: list[tuple[int, ...]]) -> None:
    with pytest.raises(ConfigError, match="must be in exactly one group"):
        KVCacheSpec(tuple(make_group(*group_layers) for group_layers in layers))


def test_a_spec_without_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be in exactly one group"):
        KVCacheSpec(())


def test_first_visible_follows_from_window_or_chunk() -> None:
    windowed_group, chunked_group = (
        make_group(0, window=16),
        KVGroup((0,), 2, 8, DType.float32, 16, is_chunked=True),
    )
    assert [windowed_group.first_visible(position) for position in (0, 15, 16, 40)] == [0, 0, 1, 25]
    assert [chunked_group.first_visible(position) for position in (0, 15, 16, 40)] == [0, 0, 16, 32]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"layers": ()}, "layers"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"window": 0}, "window"),
        ({"is_chunked": True}, "window"),
        ({"dtype": DType.int32}, "dtype"),
    ],
)
def test_the_error_names_the_invalid_field(fields: dict[str, Any], field: str) -> None:
    values: dict[str, Any] = {"layers": (0,), "kv_heads": 1, "head_dim": 8, "dtype": DType.float32}
    with pytest.raises(ConfigError, match=f"^{field}: ") as exc_info:
        KVGroup(**(values | fields))
    assert exc_info.value.field == field


@given(
    tokens=st.integers(1, 200),
    block_size=st.sampled_from([1, 2, 4, 16]),
    window=st.none() | st.integers(1, 60),
    chunk=st.integers(1, 60),
)
def test_max_blocks_is_at_least_the_number_used_in_a_simulation(
    tokens: int, block_size: int, window: int | None, chunk: int
) -> None:
    group, max_blocks = make_group(0, window=window), 0
    for start in range(0, tokens, chunk):
        first_block = group.first_visible(start) // block_size
        last_block = (min(start + chunk, tokens) - 1) // block_size
        max_blocks = max(max_blocks, last_block - first_block + 1)
    bound = group.max_blocks(tokens, block_size, chunk)
    assert max_blocks <= bound <= group.max_blocks(tokens, block_size) == -(-tokens // block_size)
    if window is None:
        assert bound == max_blocks
