"""uint8: 8-bit codes with zero points, as GPTQ checkpoints of 8 bits store them."""

from __future__ import annotations

from penstock.kernels.encodings._codes import CodeEncoding

ENCODING = CodeEncoding(8)
