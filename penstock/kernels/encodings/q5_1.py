"""q5_1: 5-bit codes with float16 scales and minima, as GGUF files store them in Q5_1 blocks."""

from __future__ import annotations

from penstock.kernels.encodings._block_kind import BlockKind
from penstock.kernels.encodings._blocks import BlockEncoding

ENCODING = BlockEncoding("q5_1", BlockKind(5, 32, "f16", "f16"))
