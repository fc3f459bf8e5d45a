"""8-bit floats (E4M3: 4 bits of exponent, 3 of mantissa, no infinity) as bytes.

The conversions use only operations on integers, float16 and float32, so that they also run on GPUs without
instructions for 8-bit floats.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.cuda.programs.tiles import round_half_even


@triton.jit
def e4m3_values(codes):
    """Return 8-bit floats as float32.

    A code without its sign, shifted left by 7, is the bit pattern of a float16 that is 2**8 times too small.
    """
    wide = codes.to(tl.uint16)
    halves = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    values = halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), values)


@triton.jit
def e4m3_codes(x):
    """Return the nearest 8-bit floats of float32 numbers, rounding half to even. NaN stays NaN.

    Magnitudes above 448 become 448, infinity included.
    """
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = (
        (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    ) - 960  # 960 = (127 - 7) << 3: the difference of the biases
    small = round_half_even(magnitude * 512.0).to(tl.int32)  # multiples of 2**-9
    codes = tl.where(magnitude < 0.015625, small, normal)
    codes = tl.where(x == x, codes, 0x7F)
    return (codes | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
