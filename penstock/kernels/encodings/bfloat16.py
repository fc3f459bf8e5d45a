"""bfloat16: weights and activations in bfloat16."""

from __future__ import annotations

from penstock.dtype import DType
from penstock.kernels.encodings._floats import FloatEncoding

ENCODING = FloatEncoding(DType.bfloat16, panel_terms=2)
