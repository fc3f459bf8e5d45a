"""Sizes of the packed forms of the encodings."""

from __future__ import annotations

PANEL = 64
"""Number of outputs of a panel."""
GROUP = 32
"""Number of inputs of a group. In int4, int5, uint4 and uint8, the inputs of a group share a scale."""
SUPERBLOCK = 256
"""Number of inputs whose scales share a factor in block encodings with superblocks, such as q4_k."""
FP8_GROUP = 128
"""Number of inputs that share a scale in fp8."""
FP8_STRIDE_BYTES = 64
"""Bytes after the table of scales of an fp8 panel: two int32 strides, padded to a cache line."""


def round_up(number: int, multiple: int) -> int:
    """Return ``number``, rounded up to a multiple of ``multiple``."""
    return -(-number // multiple) * multiple


def group_bytes(bits: int) -> int:
    """Return the bytes of a group of one output in int4 or int5: integers of ``bits`` bits, float16 scale."""
    return GROUP * bits // 8 + 2


def code_group_bytes(bits: int) -> int:
    """Return the bytes of a group of one output in uint4 or uint8: codes, float16 scale, zero point."""
    return GROUP * bits // 8 + 3


def fp8_panel_bytes(num_groups: int) -> int:
    """Return the bytes of an fp8 panel of ``num_groups`` groups: codes, table of scales, and strides."""
    return num_groups * PANEL * (FP8_GROUP + 4) + FP8_STRIDE_BYTES
