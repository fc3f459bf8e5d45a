"""q4_1: 4-bit codes with float16 scales and minima, as GGUF files store them in Q4_1 blocks."""

from __future__ import annotations

from penstock.kernels.encodings._block_kind import BlockKind
from penstock.kernels.encodings._blocks import BlockEncoding

ENCODING = BlockEncoding("q4_1", BlockKind(4, 32, "f16", "f16"))
