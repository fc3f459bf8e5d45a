"""mxfp4: 4-bit floats (E2M1) and a power-of-two scale per 32 inputs (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

from penstock.kernels.encodings._block_kind import BlockKind
from penstock.kernels.encodings._blocks import BlockEncoding

ENCODING = BlockEncoding("mxfp4", BlockKind(4, 32, "e8m0", are_floats=True))
