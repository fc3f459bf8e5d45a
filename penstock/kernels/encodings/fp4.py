"""fp4 of bitsandbytes: 4-bit floats and a float32 scale per 64 inputs.

The floats have a sign, 2 exponent bits and 1 mantissa bit. Their values are those of E2M1 (`mxfp4`, `nvfp4`)
divided by 6, except for the smallest nonzero value, which is 1 / 192 instead of 16 / 192.
"""

from __future__ import annotations

from penstock.kernels.encodings._block_kind import BlockKind, NumberTable
from penstock.kernels.encodings._blocks import BlockEncoding

_MAGNITUDES = tuple(count / 192 for count in (0, 1, 128, 192, 64, 96, 32, 48))
NUMBERS = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))

ENCODING = BlockEncoding("fp4", BlockKind(4, 64, "f32", table=NumberTable(NUMBERS, 170 * 192)))
