"""Dequantizes the block types of GGUF files to float32.

A block of IQ4_XS or of the K types (Q2_K to Q6_K) contains the codes of 256 weights in 8 or 16 groups, and
each group has a scale. A block of the other types in `READERS` contains a scale and the codes of 32 weights.
A reader is a function from blocks ``[N, bytes]`` to weights ``[N, weights of a block]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from penstock.errors import MissingDependencyError

_BLOCKS_PER_CHUNK = 1 << 12  # intermediate results of one chunk fit into the CPU's cache


def dequantize(blocks: Tensor, type_name: str) -> Tensor:
    """Return the weights in blocks. The package ``gguf`` reads the types that are not in `READERS`.

    Args:
        blocks: ``[N, bytes of a block]`` uint8.
        type_name: the block type, such as ``Q4_K``.

    Returns:
        ``[N, weights of a block]`` float32.

    Raises:
        MissingDependencyError: the package ``gguf`` is needed and not installed.
    """
    read = READERS.get(type_name) or _package_reader(type_name)
    if len(blocks) <= _BLOCKS_PER_CHUNK:
        return read(blocks)
    first_chunk = read(blocks[:_BLOCKS_PER_CHUNK])
    numbers = torch.empty(len(blocks), first_chunk.shape[1])
    numbers[:_BLOCKS_PER_CHUNK] = first_chunk
    for start in range(_BLOCKS_PER_CHUNK, len(blocks), _BLOCKS_PER_CHUNK):
        numbers[start : start + _BLOCKS_PER_CHUNK] = read(blocks[start : start + _BLOCKS_PER_CHUNK])
    return numbers


def _package_reader(type_name: str) -> Callable[[Tensor], Tensor]:
    """Return a reader that uses the package ``gguf``."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as package_dequantize
    except ImportError as problem:
        raise MissingDependencyError("gguf", "gguf", f"reading {type_name} blocks") from problem
    block_type = GGMLQuantizationType[type_name]

    def read(blocks: Tensor) -> Tensor:
        with np.errstate(all="ignore"):  # damaged scales may be infinite
            return torch.from_numpy(package_dequantize(blocks.numpy(), block_type))

    return read


def _float16_at(blocks: Tensor, start: int) -> Tensor:  # the float16 at byte `start`, as [N, 1] float32
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def nibbles(codes: Tensor) -> Tensor:
    """Return the nibbles ``[N, 2 n]`` of bytes ``[N, n]``: in each row first the low, then the high ones."""
    return torch.cat([codes & 15, codes >> 4], dim=1)


def expand_bits(packed: Tensor) -> Tensor:
    """Return the bits of each row of bytes ``[N, n]``, the lowest bit of a byte first; ``[N, 8 n]``."""
    return ((packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _float16_at(blocks, 0) * (nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _float16_at(blocks, 0) * nibbles(blocks[:, 4:]).float() + _float16_at(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = nibbles(blocks[:, 6:]) | expand_bits(blocks[:, 2:6]) << 4
    return _float16_at(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = nibbles(blocks[:, 8:]) | expand_bits(blocks[:, 4:8]) << 4
    return _float16_at(blocks, 0) * codes.float() + _float16_at(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _float16_at(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _float16_at(blocks, 0) * _IQ4_VALUES[nibbles(blocks[:, 2:]).long()]


def _iq4_xs(blocks: Tensor) -> Tensor:
    """Dequantize 8 groups of 32 weights.

    The lower 4 bits of a scale are a nibble, the upper 2 bits a part of a 16-bit number.
    """
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], dim=2).flatten(1)  # [N, 8]
    high = torch.cat([blocks[:, 2:3] >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)
    high = torch.cat([high, *(blocks[:, 3:4] >> shift & 3 for shift in (0, 2, 4, 6))], dim=1)
    scales = _float16_at(blocks, 0) * ((low | high << 4).float() - 32)
    codes = blocks[:, 8:].view(-1, 8, 16)
    numbers = _IQ4_VALUES[torch.cat([codes & 15, codes >> 4], dim=2).long()]  # [N, 8, 32]
    return (scales[:, :, None] * numbers).flatten(1)


def _mxfp4(blocks: Tensor) -> Tensor:
    """Dequantize OCP microscaling blocks: 4-bit floats with one power-of-two scale per 32 weights."""
    exponents = blocks[:, :1].int() - 127
    return torch.ldexp(_FP4_VALUES[nibbles(blocks[:, 1:]).long()], exponents)


def _q2_k(blocks: Tensor) -> Tensor:
    """Dequantize 16 groups of 16 weights, each with a 4-bit scale and a 4-bit minimum."""
    scales, minima = blocks[:, :16] & 15, blocks[:, :16] >> 4
    codes = _two_bit_codes(blocks[:, 16:80]).view(-1, 16, 16).float()
    scale = (_float16_at(blocks, 80) * scales.float())[:, :, None]
    return (scale * codes - (_float16_at(blocks, 82) * minima.float())[:, :, None]).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    """Dequantize 16 groups of 16 weights.

    The third bits of the codes are stored apart from the lower two bits.
    """
    third_bits = torch.cat([blocks[:, :32] >> shift & 1 for shift in range(8)], dim=1)
    codes = (_two_bit_codes(blocks[:, 32:96]) | third_bits << 2).view(-1, 16, 16).float() - 4
    low = nibbles(blocks[:, 96:104])
    high = torch.cat([blocks[:, 104:108] >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)
    scales = _float16_at(blocks, 108) * ((low | high << 4).float() - 32)
    return (scales[:, :, None] * codes).flatten(1)


def k_codes(packed: Tensor) -> Tensor:
    """Return the lower 4 bits of Q4_K or Q5_K codes, ``[N, 8, 32]``, from bytes ``[N, 128]``."""
    codes = packed.view(-1, 4, 32)
    return torch.stack([codes & 15, codes >> 4], dim=2).view(-1, 8, 32)


def k_fifth_bits(packed: Tensor) -> Tensor:
    """Return the fifth bits of the codes of Q5_K blocks, ``[N, 8, 32]``, from bytes ``[N, 32]``.

    Bit i of a byte belongs to group i.
    """
    return torch.stack([packed >> shift & 1 for shift in range(8)], dim=1)


def _q4_k(blocks: Tensor) -> Tensor:
    """Dequantize 8 groups of 32 weights, each with a 6-bit scale and a 6-bit minimum."""
    return _apply_scales(blocks, k_codes(blocks[:, 16:]))


def _q5_k(blocks: Tensor) -> Tensor:
    """Dequantize 8 groups of 32 weights with scales and minima as in Q4_K, and codes of 5 bits."""
    return _apply_scales(blocks, k_codes(blocks[:, 48:]) | k_fifth_bits(blocks[:, 16:48]) << 4)


def q6_k_codes(blocks: Tensor) -> Tensor:
    """Return the codes of Q6_K blocks, ``[N, 256]``.

    For each 128 weights, 64 bytes contain the low 4 bits and 32 bytes the high 2 bits.
    """
    low = blocks[:, :128].view(-1, 2, 64)
    low = torch.cat([low & 15, low >> 4], dim=2)  # [N, 2, 128]
    high = blocks[:, 128:192].view(-1, 2, 32)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=2)
    return (low | high << 4).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    """Dequantize 16 groups of 16 weights with signed 8-bit scales."""
    codes = q6_k_codes(blocks).view(-1, 16, 16).float() - 32
    scales = _float16_at(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return (scales[:, :, None] * codes).flatten(1)


def _two_bit_codes(packed: Tensor) -> Tensor:
    """Return the 2-bit codes ``[N, 256]`` in the bytes ``[N, 64]``. Each 32 bytes contain 128 codes."""
    halves = packed.view(-1, 2, 32)
    return torch.cat([halves >> shift & 3 for shift in (0, 2, 4, 6)], dim=2).flatten(1)


def k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and the minima of Q4_K or Q5_K blocks as integers, ``[N, 8]`` each.

    12 bytes contain the 6-bit scales and minima of 8 groups:

    - Bytes 0 to 3: the lower 6 bits are the scales of groups 0 to 3, the upper 2 bits are the upper bits of
      the scales of groups 4 to 7.
    - Bytes 4 to 7: the same for the minima.
    - Bytes 8 to 11: the lower 4 bits of a byte are the lower 4 bits of the scale of one of the groups 4 to 7.
      The upper 4 bits are the lower 4 bits of its minimum.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1)
    return scales, torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1)


def _apply_scales(blocks: Tensor, codes: Tensor) -> Tensor:
    """Return ``scale * code - minimum`` for the ``codes [N, 8, 32]`` of Q4_K or Q5_K blocks, ``[N, 256]``."""
    scales, minima = k_scales(blocks)
    scale = (_float16_at(blocks, 0) * scales.float())[:, :, None]
    return (scale * codes.float() - (_float16_at(blocks, 2) * minima.float())[:, :, None]).flatten(1)


_IQ4_VALUES = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32
)
"""The value of each code of the IQ4 types."""

_FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

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
"""Type name -> reader of its blocks."""
