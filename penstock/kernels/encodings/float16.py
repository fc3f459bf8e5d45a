"""float16: weights and activations in float16. The CPU back end computes in bfloat16 instead."""

from __future__ import annotations

from penstock.dtype import DType
from penstock.kernels.encodings._floats import FloatEncoding

ENCODING = FloatEncoding(DType.float16, is_deterministic=False, replacements={"cpu": "bfloat16"})
