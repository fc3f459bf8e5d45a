"""q5_k: 5-bit codes with 6-bit scales and minima, as GGUF files store them in Q5_K blocks."""

from __future__ import annotations

from penstock.kernels.encodings._block_kind import BlockKind
from penstock.kernels.encodings._blocks import BlockEncoding

ENCODING = BlockEncoding("q5_k", BlockKind(5, 32, "u8", "u8"))
