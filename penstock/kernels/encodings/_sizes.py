"""Sizes shared by the packed forms of all encodings."""

from __future__ import annotations

PANEL = 64
"""Number of outputs of a panel."""
GROUP = 32
"""Number of inputs of a group: they share a scale in int4 and int5, and in codes with zero points."""
SUPERBLOCK = 256
"""Number of inputs whose scales share a factor in the block encodings."""
FP8_GROUP = 128
"""Number of inputs that share a scale in fp8."""
FP8_STRIDES = 64
"""Bytes at the end of a panel of fp8: two int32 strides, padded to a cache line."""


def round_up(number: int, multiple: int) -> int:
    """Return ``number``, rounded up to a multiple of ``multiple``."""
    return -(-number // multiple) * multiple


def group_bytes(bits: int) -> int:
    """Return the bytes of a group of one output: integers of ``bits`` bits and a float16 scale."""
    return GROUP * bits // 8 + 2


def code_group_bytes(bits: int) -> int:
    """Return the bytes of a group of one output: codes of ``bits`` bits, float16 scale, zero point."""
    return GROUP * bits // 8 + 3


def fp8_panel_bytes(groups: int) -> int:
    """Return the bytes of an fp8 panel: codes, table of scales, and strides."""
    return groups * PANEL * (FP8_GROUP + 4) + FP8_STRIDES
