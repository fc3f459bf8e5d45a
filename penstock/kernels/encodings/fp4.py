"""fp4 of bitsandbytes: 4-bit floats and a float32 scale per 64 inputs.

The floats have a sign, 2 exponent bits and 1 mantissa bit. Their values are the E2M1 numbers (`mxfp4`,
`nvfp4`) divided by 6, except that the smallest nonzero magnitude is 1 / 192 instead of 16 / 192. The codes
are not in the order of the values.
"""

from __future__ import annotations

from penstock.kernels.encodings._block_kind import BlockKind, NumberTable
from penstock.kernels.encodings._blocks import BlockEncoding

_MAGNITUDES = tuple(numerator / 192 for numerator in (0, 1, 128, 192, 64, 96, 32, 48))
NUMBERS = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))
"""The number of each code."""

ENCODING = BlockEncoding("fp4", BlockKind(4, 64, "f32", table=NumberTable(NUMBERS, 170 * 192)))
