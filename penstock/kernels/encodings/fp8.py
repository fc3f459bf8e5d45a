"""fp8: weights as 8-bit floats (E4M3) with a float32 scale for each 128 inputs of an output.

``weight`` is uint8 ``[out, in]``, the bytes of torch's ``float8_e4m3fn``. ``scales`` is float32
``[out, ceil(in / 128)]``. Activations are bfloat16. Micikevicius et al. 2022, arXiv:2209.05433.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.dtype import DType
from penstock.kernels.encodings import LayerRole, LinearEncoding
from penstock.kernels.encodings._sizes import FP8_GROUP, PANEL, fp8_panel_bytes, round_up

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.panels import PanelLayout


class Fp8Encoding(LinearEncoding):
    """Weights as 8-bit floats with a scale per group of inputs."""

    name = "fp8"
    number_format = "e4m3"
    compute_dtype = DType.bfloat16
    storage_dtype = DType.uint8
    bits = 8
    group_size = FP8_GROUP
    is_internal = True

    @property
    def panels(self) -> PanelLayout:
        from penstock.kernels.codes import Fp8Panels

        return Fp8Panels()

    def for_layer(self, role: LayerRole, out_features: int, in_features: int) -> str:
        """Return int8 for the output head, because int8 is more precise, else this encoding."""
        return "int8" if role == "head" else self.name

    def num_bytes(self, out_features: int, in_features: int) -> int:
        num_groups = round_up(in_features, FP8_GROUP) // FP8_GROUP
        return round_up(out_features, PANEL) // PANEL * fp8_panel_bytes(num_groups)

    def pack(self, weight: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
        """Scale the largest finite magnitude of each output to 448; ``importance`` has no effect."""
        from penstock.kernels.codes import quantize_fp8

        return quantize_fp8(weight)

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        from penstock.kernels.codes import unpack_fp8

        return unpack_fp8(tensors)

    def multiply(self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        from penstock.kernels.codes import multiply_fp8

        return multiply_fp8(x, tensors, bias)


ENCODING = Fp8Encoding()
