"""q4_z: 4-bit integers with float16 scales and floating-point zero points, as torchao stores them.

A weight is ``(scale * (code - 8) + zero) * row_scale``. The tensor ``minima`` holds ``-zero``. Row scales are
powers of two.
"""

from __future__ import annotations

from penstock.kernels.encodings._block_kind import BlockKind
from penstock.kernels.encodings._blocks import BlockEncoding

ENCODING = BlockEncoding("q4_z", BlockKind(4, 32, "f16", "f16", has_row_scales=True, is_centred=True))
