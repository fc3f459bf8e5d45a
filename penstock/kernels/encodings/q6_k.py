"""q6_k: 6-bit codes with 8-bit scales, as GGUF files store them in Q6_K blocks."""

from __future__ import annotations

from penstock.kernels.encodings._block_kind import BlockKind
from penstock.kernels.encodings._blocks import BlockEncoding

ENCODING = BlockEncoding("q6_k", BlockKind(6, 16, "i8"))
