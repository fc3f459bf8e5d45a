"""int8: weights as 8-bit integers with a float32 scale per output.

``weight`` is int8 ``[out, in]``. ``scales`` is float32 ``[out]``: the largest magnitude of a row divided by
127. The product quantizes each row of the activations separately. Outlier activations of trained models
(Dettmers et al. 2022, arXiv:2208.07339) can become integers of more than 8 bits, see
`penstock.kernels.quantized.quantize_activations`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.dtype import DType
from penstock.kernels.encodings import LinearEncoding
from penstock.kernels.encodings._sizes import PANEL, round_up

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.panels import PanelLayout


class Int8Encoding(LinearEncoding):
    """Weights as 8-bit integers with one scale per output."""

    name = "int8"
    number_format = "integer"
    compute_dtype = DType.bfloat16
    storage_dtype = DType.int8
    activation_dtype = DType.int8
    bits = 8
    max_repeated_inputs = PANEL

    @property
    def panels(self) -> PanelLayout:
        from penstock.kernels.panels import Int8Panels

        return Int8Panels()

    @property
    def bits_per_weight(self) -> float:
        return 8

    def num_bytes(self, out_features: int, in_features: int) -> int:
        return round_up(out_features, PANEL) * round_up(in_features, 4) + 4 * out_features

    def pack(self, weight: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
        """Quantize each row by its largest magnitude; ``importance`` has no effect."""
        from penstock.kernels.quantized import quantize

        integers, scales = quantize(weight)
        return {"weight": integers, "scales": scales}

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight"].float() * tensors["scales"][:, None]

    def multiply(self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        """Return ``sum(x_q * w_q) * (scale_x * scale_w) + bias``, rounded once to the type of x."""
        from penstock.kernels.quantized import multiply_rows

        return multiply_rows(x, tensors, bias)


ENCODING = Int8Encoding()
