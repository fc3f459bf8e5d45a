"""MXFP4: blocks of 32 numbers of four bits that share a scale of eight (OCP Microscaling Formats 1.0).

A number is E2M1: a sign, two bits of exponent, one of mantissa. A scale is E8M0: 2 to the power of it less
127, and NaN for 255. Two numbers lie in a byte, the first in the lower half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.weights.safetensors import TensorHeader

BLOCK = 32
"""Numbers that share a scale."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """The numbers that ``blocks [..., G, 16]`` with ``scales [..., G]``, bytes both, stand for.

    Returns:
        ``[..., 32 G]`` bfloat16, which holds each of them exactly but the few beyond its range.
    """
    import torch

    numbers = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)])
    pairs = torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], dim=1)  # [256, 2]
    powers = torch.tensor([2.0 ** (scale - 127) for scale in range(255)] + [torch.nan])
    values = pairs[blocks.int()].flatten(-2)  # [..., G, 32] float32
    return values.mul_(powers[scales.int()][..., None]).flatten(-2).bfloat16()


def dequantized_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of the numbers that the bytes called ``name`` stand for; None if they are no MXFP4 blocks."""
    if not name.endswith("_blocks") or len(shape) < 3 or shape[-1] != BLOCK // 2:
        return None
    return (*shape[:-2], shape[-2] * BLOCK)


def is_scales(name: str, header: TensorHeader) -> bool:
    """Whether a tensor holds the scales of some blocks, of which nothing is left once they are read."""
    return name.endswith("_scales") and header.type_name == "U8"
