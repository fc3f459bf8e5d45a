"""Weights as unsigned codes with a zero point and a float16 scale per group of 32 inputs.

GPTQ, AWQ and compressed-tensors checkpoints store such weights. A larger group of a checkpoint becomes
several groups of 32 inputs. A weight is ``(code - zero) * scale * row_scale``. ``weight`` is uint8 ``[out,
in]``, ``zeros`` uint8 ``[out, ceil(in / 32)]``, ``scales`` float16 ``[out, ceil(in / 32)]``, and
``row_scales`` float32 ``[out]``. Row scales are powers of two that bring the scales of a row into the range
of float16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.dtype import DType
from penstock.kernels.encodings import LayerRole, LinearEncoding
from penstock.kernels.encodings._sizes import GROUP, PANEL, code_group_bytes, round_up

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.panels import PanelLayout


class CodeEncoding(LinearEncoding):
    """Weights as unsigned codes of ``bits`` bits with scales and zero points."""

    number_format = "integer"
    compute_dtype = DType.bfloat16
    storage_dtype = DType.uint8
    activation_dtype = DType.int8
    group_size = GROUP
    has_zero_points = True
    is_internal = True

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.name = f"uint{bits}"

    @property
    def panels(self) -> PanelLayout:
        from penstock.kernels.codes import CodePanels

        return CodePanels(self.bits)

    def for_layer(self, role: LayerRole, out_features: int, in_features: int) -> str:
        """Return int8 for the output head, which these checkpoints store as floats, else this encoding."""
        return "int8" if role == "head" else self.name

    def num_bytes(self, out_features: int, in_features: int) -> int:
        num_groups = round_up(out_features, PANEL) * round_up(in_features, GROUP) // GROUP
        return num_groups * code_group_bytes(self.bits) + 4 * out_features

    def pack(self, weight: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
        """Quantize each group by its range, extended to contain 0; ``importance`` has no effect."""
        from penstock.kernels.codes import quantize_codes

        return quantize_codes(weight, self.bits)

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        from penstock.kernels.codes import unpack_codes

        return unpack_codes(tensors)

    def multiply(self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        from penstock.kernels.codes import multiply_codes

        return multiply_codes(x, tensors, bias)
