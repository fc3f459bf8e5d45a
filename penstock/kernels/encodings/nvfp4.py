"""nvfp4: 4-bit floats (E2M1), an 8-bit float scale (E4M3) per 16 inputs, and a float32 scale per output."""

from __future__ import annotations

from penstock.kernels.encodings._block_kind import BlockKind
from penstock.kernels.encodings._blocks import BlockEncoding

ENCODING = BlockEncoding("nvfp4", BlockKind(4, 16, "e4m3", are_floats=True, has_row_scales=True))
