"""uint4: 4-bit codes with zero points, as GPTQ and AWQ checkpoints store them."""

from __future__ import annotations

from penstock.kernels.encodings._codes import CodeEncoding

ENCODING = CodeEncoding(4)
