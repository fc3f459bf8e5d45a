"""float16 weights and activations. The CPU back end cannot compute in float16; it uses bfloat16."""

from __future__ import annotations

from penstock.dtype import DType
from penstock.kernels.encodings._floats import FloatEncoding

ENCODING = FloatEncoding(DType.float16, is_deterministic=False, replacements={"cpu": "bfloat16"})
