"""Sizes shared by the packed forms of all encodings."""

from __future__ import annotations

PANEL = 64
"""Outputs of a panel."""
GROUP = 32
"""Inputs of a group of int4 and int5, and of codes with zero points."""
SUPERBLOCK = 256
"""Inputs that share a factor of their scales in the encodings of blocks."""
FP8_GROUP = 128
"""Inputs that share a scale in fp8."""
FP8_STRIDES = 64
"""Bytes at the end of a panel of fp8: two int32 strides, padded to a cache line."""


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple that is at least the number."""
    return -(-number // multiple) * multiple


def group_bytes(bits: int) -> int:
    """Return the bytes of one output's integers of one group, and of their scale."""
    return GROUP * bits // 8 + 2


def code_group_bytes(bits: int) -> int:
    """Return the bytes of one output's codes of one group, and of their scale and zero point."""
    return GROUP * bits // 8 + 3


def fp8_panel_bytes(groups: int) -> int:
    """Return the bytes of a panel of fp8: its codes, its table of scales and their strides."""
    return groups * PANEL * (FP8_GROUP + 4) + FP8_STRIDES
