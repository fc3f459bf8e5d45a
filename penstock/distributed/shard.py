"""The sharding rules: which part of a layer's dimension each rank holds.

A dimension is divided into indivisible units. A unit is for example a kv head with its query heads, a
quantization group of inputs, or an expert. Each rank gets a contiguous range of units. The numbers of units
differ by at most one. Rank 0 gets one of the smaller ranges, because it also schedules and samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import ConfigError
from penstock.kernels.collectives import Collectives

VOCABULARY_UNIT = 16
"""Tokens per indivisible unit of the vocabulary.

A vocabulary with fewer whole units than ranks is divided into units of one token.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A contiguous part of a dimension: the indices ``start`` to ``stop - 1``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of indices."""
        return self.stop - self.start

    def times(self, factor: int) -> Part:
        """Return the part of a dimension with ``factor`` entries per index of this part."""
        return Part(self.start * factor, self.stop * factor)

    def shifted(self, offset: int) -> Part:
        """Return the part with ``offset`` added to both ends."""
        return Part(self.start + offset, self.stop + offset)


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """The heads of a rank.

    Query head ``h`` of the rank, counted from 0, reads kv head ``h // (heads.size / kv_heads.size)`` of the
    rank.
    """

    heads: Part
    kv_heads: Part


@dataclass(frozen=True, slots=True)
class Shard:
    """Computes the part of each dimension that a rank holds.

    >>> Shard(1, 2).part(88, "mlp", 32)  # 3 units of 32, 32 and 24
    Part(start=32, stop=88)

    Args:
        rank: 0 to world_size - 1.
        world_size: number of ranks. With 1, the rank holds whole layers.
        by_expert: whether a rank holds whole experts instead of a part of each expert.
        collectives: the operations that add and gather the tensors of all ranks; None if the shard is used
            only to compute parts, or for one rank.
    """

    rank: int = 0
    world_size: int = 1
    by_expert: bool = False
    collectives: Collectives | None = None

    @property
    def is_whole(self) -> bool:
        """Whether there is only one rank, which holds whole layers."""
        return self.world_size == 1

    def part(self, size: int, name: str, unit: int = 1) -> Part:
        """Return this rank's part of a dimension.

        Args:
            size: number of indices of the dimension.
            name: the name of the dimension, for the error message.
            unit: indices per indivisible unit. The last unit can be smaller.

        Raises:
            ConfigError: there are fewer units than ranks.
        """
        return self._parts(size, name, unit)[self.rank]

    def parts(self, size: int, name: str, unit: int = 1) -> tuple[Part, ...]:
        """Return the parts of all ranks; see `part`."""
        return self._parts(size, name, unit)

    def attention(self, num_heads: int, num_kv_heads: int) -> AttentionPart:
        """Return this rank's query and kv heads.

        With fewer kv heads than ranks, several ranks hold the same kv head and divide the query heads that
        read it.

        Raises:
            ConfigError: the heads cannot be divided among the ranks.
        """
        return self.attention_parts(num_heads, num_kv_heads)[self.rank]

    def attention_parts(self, num_heads: int, num_kv_heads: int) -> tuple[AttentionPart, ...]:
        """Return the heads of all ranks; see `attention`."""
        queries_per_kv_head = num_heads // num_kv_heads
        if num_kv_heads >= self.world_size:
            kv_parts = self._parts(num_kv_heads, "kv heads", 1)
            return tuple(AttentionPart(part.times(queries_per_kv_head), part) for part in kv_parts)
        if self.world_size % num_kv_heads or queries_per_kv_head < self.world_size // num_kv_heads:
            raise ConfigError(
                "tensor_parallel_size",
                f"{self.world_size} ranks cannot divide {num_heads} attention heads with {num_kv_heads} kv "
                f"heads: use a number up to {num_kv_heads}, or a multiple of {num_kv_heads} up to "
                f"{num_heads}",
            )
        ranks_per_kv_head = self.world_size // num_kv_heads
        query_parts = Shard(0, ranks_per_kv_head).parts(queries_per_kv_head, "attention heads")
        return tuple(
            AttentionPart(
                query_parts[rank % ranks_per_kv_head].shifted(
                    rank // ranks_per_kv_head * queries_per_kv_head
                ),
                Part(rank // ranks_per_kv_head, rank // ranks_per_kv_head + 1),
            )
            for rank in range(self.world_size)
        )

    def kv_heads(self, num_kv_heads: int) -> Part:
        """Return this rank's kv heads.

        With fewer kv heads than ranks, several ranks hold the same kv head.
        """
        if num_kv_heads >= self.world_size:
            return self.part(num_kv_heads, "kv heads")
        head = self.rank * num_kv_heads // self.world_size
        return Part(head, head + 1)

    def num_kv_heads(self, num_kv_heads: int) -> int:
        """Return the number of kv heads of this rank."""
        return self.kv_heads(num_kv_heads).size

    def max_kv_heads(self, num_kv_heads: int) -> int:
        """Return the largest number of kv heads of any rank."""
        return max(-(-num_kv_heads // self.world_size), 1)

    def vocabulary(self, size: int) -> Part:
        """Return the tokens whose rows of the embedding table and of the output head this rank holds."""
        return self.vocabulary_parts(size)[self.rank]

    def vocabulary_parts(self, size: int) -> tuple[Part, ...]:
        """Return the tokens of each rank; see `vocabulary`."""
        unit = VOCABULARY_UNIT if size >= VOCABULARY_UNIT * self.world_size else 1
        return self._parts(size, "tokens of the vocabulary", unit)

    def _parts(self, size: int, name: str, unit: int) -> tuple[Part, ...]:
        num_units = -(-size // unit)
        if num_units < self.world_size:
            unit_text = "" if unit == 1 else f", which is {num_units} groups of {unit}"
            raise ConfigError(
                "tensor_parallel_size",
                f"{self.world_size} ranks cannot divide {size} {name}{unit_text}: use at most {num_units} "
                "ranks",
            )
        boundaries = [
            min(num_units * rank // self.world_size * unit, size) for rank in range(self.world_size + 1)
        ]
        return tuple(Part(start, stop) for start, stop in pairwise(boundaries))


def sizes(parts: Sequence[Part]) -> tuple[int, ...]:
    """Return the size of each part."""
    return tuple(part.size for part in parts)
