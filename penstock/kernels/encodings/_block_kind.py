"""`BlockKind`: the parameters of a block encoding, from which its arithmetic and its panel layout follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.kernels.encodings._sizes import GROUP, SUPERBLOCK

ScaleType = Literal["u8", "i8", "f16", "f32", "e8m0", "e4m3"]
"""Storage type of scales or minima: unsigned or signed bytes, float16, float32, powers of two (E8M0), or
8-bit floats (E4M3)."""
SCALE_BYTES = {"u8": 1, "i8": 1, "f16": 2, "f32": 4, "e8m0": 1, "e4m3": 1}
"""Bytes of a number of each storage type."""


@dataclass(frozen=True, slots=True)
class NumberTable:
    """The table of an encoding whose codes are indices: 16 numbers between -1 and 1."""

    numbers: tuple[float, ...]
    steps: int
    """The product rounds each number to a multiple of ``1 / steps``. The multiples fit in 16 bits."""


class BlockKind:
    """The parameters of a block encoding.

    Args:
        bits: bits of a code.
        group_size: number of inputs that share a scale: 16, 32 or 64. With 64, they are a unit (`unit`).
        scale_type: how a scale is stored.
        min_type: how a minimum is stored; None if there are no minima.
        are_floats: whether codes are E2M1 numbers.
        has_row_scales: whether each output also has a float32 scale.
        is_centred: whether ``2 ** (bits - 1)`` is subtracted from codes although there are minima.
        table: the numbers that codes represent, if codes are indices into a table.
    """

    def __init__(
        self,
        bits: int,
        group_size: int,
        scale_type: ScaleType,
        min_type: ScaleType | None = None,
        *,
        are_floats: bool = False,
        has_row_scales: bool = False,
        is_centred: bool = False,
        table: NumberTable | None = None,
    ) -> None:
        self.bits = bits
        self.scaled_inputs = group_size
        self.scale_type: ScaleType = scale_type
        self.min_type: ScaleType | None = min_type
        self.are_floats = are_floats
        self.has_row_scales = has_row_scales
        self.table = table
        self.has_superblocks = scale_type in ("u8", "i8")
        is_offset = is_centred or not (min_type or are_floats or table)
        self.is_centred = is_centred
        self.offset = 1 << bits - 1 if is_offset else 0  # subtracted from integer codes

    @property
    def unit(self) -> int:
        """Number of inputs of a unit: the inputs that are stored together, see `kernels.block_panels`."""
        return SUPERBLOCK if self.has_superblocks else max(self.scaled_inputs, GROUP)

    @property
    def has_unit_scales(self) -> bool:
        """Whether a unit has one scale per output, stored after its groups."""
        return self.scaled_inputs > GROUP

    @property
    def group_bytes(self) -> int:
        """Bytes of a group of 32 inputs of one output: codes, scales and minimum, without `factor_bytes`."""
        scale_bytes = SCALE_BYTES[self.scale_type] * (GROUP // self.scaled_inputs)  # 0 with `has_unit_scales`
        return GROUP * self.bits // 8 + scale_bytes + (SCALE_BYTES[self.min_type] if self.min_type else 0)

    @property
    def factor_bytes(self) -> int:
        """Bytes per output after the groups of a unit: its scale or its factors; 0 if it has neither."""
        if self.has_unit_scales:
            return SCALE_BYTES[self.scale_type]
        return (2 + (2 if self.min_type else 0)) if self.has_superblocks else 0
