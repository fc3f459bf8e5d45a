"""float32: weights and activations in 32-bit floats."""

from __future__ import annotations

from penstock.dtype import DType
from penstock.kernels.encodings._floats import FloatEncoding

ENCODING = FloatEncoding(DType.float32, panel_terms=1)
