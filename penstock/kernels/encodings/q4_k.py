"""q4_k: 4-bit codes with 6-bit scales and minima, as GGUF files store them in Q4_K blocks."""

from __future__ import annotations

from penstock.kernels.encodings._block_kind import BlockKind
from penstock.kernels.encodings._blocks import BlockEncoding

ENCODING = BlockEncoding("q4_k", BlockKind(4, 32, "u8", "u8"))
