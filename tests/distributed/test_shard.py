"""The rules by which ranks divide dimensions, attention heads and the vocabulary."""

from __future__ import annotations

import pytest

from penstock.distributed import Part, Shard
from penstock.errors import ConfigError


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("size", "unit"), [(88, 1), (88, 8), (97, 4), (11008, 128), (40, 5)])
def test_parts_cover_the_dimension_and_split_no_unit(world_size: int, size: int, unit: int) -> None:
    parts = Shard(0, world_size).parts(size, "inputs", unit)
    assert [index for part in parts for index in range(part.start, part.stop)] == list(range(size))
    assert all(part.start % unit == 0 for part in parts)
    unit_counts = [-(-part.size // unit) for part in parts]
    assert max(unit_counts) - min(unit_counts) <= 1
    assert parts[0].size == min(part.size for part in parts[:-1] or parts)


def test_the_error_for_too_few_units_states_the_numbers() -> None:
    with pytest.raises(ConfigError, match="3 ranks cannot divide 64 inputs, which is 2 groups of 32"):
        Shard(0, 3).part(64, "inputs", 32)


@pytest.mark.parametrize(
    ("world_size", "heads", "kv_heads"), [(2, 6, 2), (2, 9, 3), (3, 9, 3), (4, 8, 2), (2, 4, 1), (4, 12, 2)]
)
def test_each_query_head_is_on_the_rank_of_its_kv_head(world_size: int, heads: int, kv_heads: int) -> None:
    parts = Shard(0, world_size).attention_parts(heads, kv_heads)
    assert [h for part in parts for h in range(part.heads.start, part.heads.stop)] == list(range(heads))
    for rank, part in enumerate(parts):
        queries_per_kv_head = part.heads.size // part.kv_heads.size
        for local_index in range(part.heads.size):
            kv_head = (part.heads.start + local_index) // (heads // kv_heads)
            assert part.kv_heads.start + local_index // queries_per_kv_head == kv_head
        assert part.kv_heads.size == Shard(rank, world_size).num_kv_heads(kv_heads)
        assert part.kv_heads.size <= Shard(0, world_size).max_kv_heads(kv_heads)


def test_the_error_for_indivisible_heads_states_the_numbers() -> None:
    with pytest.raises(ConfigError, match="5 ranks cannot divide 8 attention heads with 2 kv heads"):
        Shard(0, 5).attention(8, 2)
    with pytest.raises(ConfigError, match="4 ranks cannot divide 2 attention heads with 2 kv heads"):
        Shard(0, 4).attention(2, 2)


def test_the_vocabulary_is_split_between_groups_of_16_tokens_if_every_rank_gets_one() -> None:
    assert Shard(0, 2).vocabulary_parts(130) == (Part(0, 64), Part(64, 130))
    assert Shard(0, 4).vocabulary_parts(30)[3] == Part(22, 30)
