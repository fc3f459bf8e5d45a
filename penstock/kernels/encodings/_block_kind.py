"""`BlockKind`: the parameters of a block encoding, for its arithmetic and its panels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.kernels.encodings._sizes import GROUP, SUPERBLOCK

ScaleType = Literal["u8", "i8", "f16", "f32", "e8m0", "e4m3"]
"""Storage type of scales: unsigned or signed bytes, float16, float32, powers of two (E8M0), or 8-bit floats
(E4M3)."""
SCALE_BYTES = {"u8": 1, "i8": 1, "f16": 2, "f32": 4, "e8m0": 1, "e4m3": 1}


@dataclass(frozen=True, slots=True)
class NumberTable:
    """The 16 numbers that the codes represent, from -1 to 1."""

    numbers: tuple[float, ...]
    steps: int
    """The product rounds each number to a multiple of ``1 / steps``, and multiplies by this 16-bit
    multiple."""


class BlockKind:
    """The parameters of a kind of blocks.

    Args:
        bits: bits of a code.
        group_size: inputs that share a scale: 16, 32, or all inputs of a unit.
        scale_type: how a scale is stored.
        min_type: how a minimum is stored; None if there are no minima.
        are_floats: whether codes are E2M1 numbers.
        has_row_scales: whether each output has a further scale.
        is_centred: whether codes are reduced by half of their range although there are minima.
        table: the numbers of the codes, if codes are indices of a table.
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
        self.offset = 1 << bits - 1 if is_offset else 0

    @property
    def unit(self) -> int:
        """Number of inputs of a unit of a panel, see `kernels.block_panels`."""
        return SUPERBLOCK if self.has_superblocks else max(self.scaled_inputs, GROUP)

    @property
    def has_unit_scales(self) -> bool:
        """Whether a unit has one scale per output, stored after its groups."""
        return self.scaled_inputs > GROUP

    @property
    def group_bytes(self) -> int:
        """Bytes of a group of 32 inputs of one output: codes, scales and minimum, without unit factors."""
        scales = SCALE_BYTES[self.scale_type] * (GROUP // self.scaled_inputs)  # 0 if the unit has the scale
        return GROUP * self.bits // 8 + scales + (SCALE_BYTES[self.min_type] if self.min_type else 0)

    @property
    def factor_bytes(self) -> int:
        """Bytes per output after the groups of a unit: the scale of the unit, or its factors."""
        if self.has_unit_scales:
            return SCALE_BYTES[self.scale_type]
        return (2 + (2 if self.min_type else 0)) if self.has_superblocks else 0
