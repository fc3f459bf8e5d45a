"""Weights as integers of few bits with a float16 scale per group of 32 inputs.

``weight`` is int8 ``[out, in]`` with signed integers of ``bits`` bits. ``scales`` is float16 ``[out, ceil(in
/ 32)]``. Scales can be negative. Frantar et al. 2022, arXiv:2210.17323, describe scales per group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.dtype import DType
from penstock.kernels.encodings import LinearEncoding
from penstock.kernels.encodings._sizes import GROUP, PANEL, group_bytes, round_up

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.panels import PanelLayout


class GroupedEncoding(LinearEncoding):
    """Weights as signed integers of ``bits`` bits with a scale per group of 32 inputs."""

    number_format = "integer"
    compute_dtype = DType.bfloat16
    storage_dtype = DType.int8
    activation_dtype = DType.int8
    group_size = GROUP
    needs_calibration = True
    packs_lazily = True

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.name = f"int{bits}"

    @property
    def panels(self) -> PanelLayout:
        from penstock.kernels.panels import GroupPanels

        return GroupPanels(self.bits)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        num_groups = round_up(out_features, PANEL) * round_up(in_features, GROUP) // GROUP
        return num_groups * group_bytes(self.bits)

    def pack(self, weight: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
        from penstock.kernels.quantized import quantize_groups

        integers, scales = quantize_groups(weight, self.bits, importance)
        return {"weight": integers, "scales": scales}

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        weight, scales = tensors["weight"], tensors["scales"]
        return weight.float() * scales.float().repeat_interleave(GROUP, 1)[:, : weight.shape[1]]

    def multiply(self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        """Return the sum over groups of ``sum(x_q * w_q) * scale_x * scale_w``, plus the bias."""
        from penstock.kernels.quantized import multiply_groups

        return multiply_groups(x, tensors, bias)
