"""From the blocks that GGUF files store numbers in to float32.

A block is some scales and the codes of 32 numbers, or of 256 in the K types, whose 8 or 16 groups have
scales of their own. Each reader takes blocks ``[N, bytes]`` and gives ``[N, numbers]``. That a value is
exactly what the format says follows from the order of operations alone: products of a 16-bit scale and a
small integer are exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

_BLOCKS_AT_ONCE = 1 << 12  # what is in between, ten times the bytes of the blocks, stays in the cache


def dequantize(blocks: Tensor, type_name: str) -> Tensor:
    """The numbers in blocks of a type that `READERS` has.

    Args:
        blocks: ``[N, bytes of a block]`` uint8.
        type_name: such as ``Q4_K``.

    Returns:
        ``[N, numbers of a block]`` float32.
    """
    read = READERS[type_name]
    if len(blocks) <= _BLOCKS_AT_ONCE:
        return read(blocks)
    first = read(blocks[:_BLOCKS_AT_ONCE])
    numbers = torch.empty(len(blocks), first.shape[1])
    numbers[:_BLOCKS_AT_ONCE] = first
    for start in range(_BLOCKS_AT_ONCE, len(blocks), _BLOCKS_AT_ONCE):
        numbers[start : start + _BLOCKS_AT_ONCE] = read(blocks[start : start + _BLOCKS_AT_ONCE])
    return numbers


def _half(blocks: Tensor, start: int) -> Tensor:  # [N, 1] float32, of the 16-bit float at byte `start`
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(codes: Tensor) -> Tensor:  # [N, n] -> [N, 2 n]: all low halves, then all high ones
    return torch.cat([codes & 15, codes >> 4], dim=1)


def _bits(packed: Tensor) -> Tensor:  # [N, n] -> [N, 8 n], lowest first
    return ((packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return _half(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _UNEVEN[_nibbles(blocks[:, 2:]).long()]


def _iq4_xs(blocks: Tensor) -> Tensor:
    """Eight groups of 32: the lower 4 bits of a scale in half a byte, the upper 2 in one 16-bit number."""
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], dim=2).flatten(1)  # [N, 8]
    high = torch.cat([blocks[:, 2:3] >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)
    high = torch.cat([high, *(blocks[:, 3:4] >> shift & 3 for shift in (0, 2, 4, 6))], dim=1)
    scales = _half(blocks, 0) * ((low | high << 4).float() - 32)
    codes = blocks[:, 8:].view(-1, 8, 16)
    numbers = _UNEVEN[torch.cat([codes & 15, codes >> 4], dim=2).long()]  # [N, 8, 32]
    return (scales[:, :, None] * numbers).flatten(1)


def _mxfp4(blocks: Tensor) -> Tensor:
    """OCP's microscaling: 4-bit floats, and a power of two for each 32."""
    exponents = blocks[:, :1].int() - 127
    return torch.ldexp(_FOUR_BIT_FLOATS[_nibbles(blocks[:, 1:]).long()], exponents)


def _q2_k(blocks: Tensor) -> Tensor:
    """16 groups of 16, each with a scale and a minimum of 4 bits."""
    scales, minima = blocks[:, :16] & 15, blocks[:, :16] >> 4
    codes = _crumbs(blocks[:, 16:80]).view(-1, 16, 16).float()
    scale = (_half(blocks, 80) * scales.float())[:, :, None]
    return (scale * codes - (_half(blocks, 82) * minima.float())[:, :, None]).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    """16 groups of 16: two bits of a code together, the third apart, where 1 stands for 4 more."""
    third = torch.cat([blocks[:, :32] >> shift & 1 for shift in range(8)], dim=1)
    codes = (_crumbs(blocks[:, 32:96]) | third << 2).view(-1, 16, 16).float() - 4
    low = _nibbles(blocks[:, 96:104])
    high = torch.cat([blocks[:, 104:108] >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)
    scales = _half(blocks, 108) * ((low | high << 4).float() - 32)
    return (scales[:, :, None] * codes).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    """Eight groups of 32, each with a scale and a minimum of 6 bits."""
    codes = blocks[:, 16:].view(-1, 4, 32)
    codes = torch.stack([codes & 15, codes >> 4], dim=2).view(-1, 8, 32)
    return _scaled(blocks, codes)


def _q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K, with the fifth bits of group i in the i-th bits of 32 bytes."""
    codes = blocks[:, 48:].view(-1, 4, 32)
    codes = torch.stack([codes & 15, codes >> 4], dim=2).view(-1, 8, 32)
    fifth = torch.stack([blocks[:, 16:48] >> shift & 1 for shift in range(8)], dim=1)
    return _scaled(blocks, codes | fifth << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    """16 groups of 16 with signed scales; of each 128 numbers 4 bits in 64 bytes, 2 bits in 32."""
    low = blocks[:, :128].view(-1, 2, 64)
    low = torch.cat([low & 15, low >> 4], dim=2)  # [N, 2, 128]
    high = blocks[:, 128:192].view(-1, 2, 32)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=2)
    codes = (low | high << 4).view(-1, 16, 16).float() - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return (scales[:, :, None] * codes).flatten(1)


def _crumbs(packed: Tensor) -> Tensor:  # [N, 64] -> [N, 256]: 2-bit codes, those of 128 in 32 bytes
    halves = packed.view(-1, 2, 32)
    return torch.cat([halves >> shift & 3 for shift in (0, 2, 4, 6)], dim=2).flatten(1)


def _scaled(blocks: Tensor, codes: Tensor) -> Tensor:
    """``codes [N, 8, 32]`` by the scales and minima at the start of a Q4_K or Q5_K block.

    The first 4 bytes of the 12 that hold them are the scales of groups 0 to 3 and, in their upper 2 bits,
    the upper bits of those of groups 4 to 7; the next 4 are the minima alike; in the last 4 the lower
    bits of both.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1)
    scale = (_half(blocks, 0) * scales.float())[:, :, None]
    return (scale * codes.float() - (_half(blocks, 2) * minima.float())[:, :, None]).flatten(1)


_UNEVEN = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32
)
"""What the codes of the IQ4 types stand for."""

_FOUR_BIT_FLOATS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

READERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""The types whose blocks can be read."""
