"""What the encodings of blocks have in common with their arithmetic and their panels."""

from __future__ import annotations

from typing import Literal

from penstock.kernels.encodings._sizes import GROUP, SUPERBLOCK

ScaleType = Literal["u8", "i8", "f16", "e8m0", "e4m3"]
"""Unsigned or signed bytes, float16, powers of two (E8M0), or 8-bit floats (E4M3)."""
SCALE_BYTES = {"u8": 1, "i8": 1, "f16": 2, "e8m0": 1, "e4m3": 1}


class BlockKind:
    """The sizes and the numbers of a kind of blocks.

    Args:
        bits: bits of a code.
        group_size: inputs that share a scale: 16 or 32.
        scale_type: how a scale is stored.
        min_type: how a minimum is stored; None if there are no minima.
        are_floats: whether codes are E2M1 numbers.
        has_row_scales: whether each output has a further scale.
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
    ) -> None:
        self.bits = bits
        self.scaled_inputs = group_size
        self.scale_type: ScaleType = scale_type
        self.min_type: ScaleType | None = min_type
        self.are_floats = are_floats
        self.has_row_scales = has_row_scales
        self.has_superblocks = scale_type in ("u8", "i8")
        self.offset = 0 if min_type or are_floats else 1 << bits - 1

    @property
    def unit(self) -> int:
        """Inputs of a unit of a panel."""
        return SUPERBLOCK if self.has_superblocks else GROUP

    @property
    def group_bytes(self) -> int:
        """Bytes of 32 inputs of one output: codes, scales and minimum, without factors."""
        scales = SCALE_BYTES[self.scale_type] * (GROUP // self.scaled_inputs)
        return GROUP * self.bits // 8 + scales + (SCALE_BYTES[self.min_type] if self.min_type else 0)

    @property
    def factor_bytes(self) -> int:
        """Bytes of the factors of a unit of one output."""
        return (2 + (2 if self.min_type else 0)) if self.has_superblocks else 0
