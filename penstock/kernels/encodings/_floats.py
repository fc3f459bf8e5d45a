"""Weights as plain floating-point numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.dtype import DType
from penstock.kernels.encodings import LinearEncoding
from penstock.kernels.encodings._sizes import PANEL, round_up

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.panels import PanelLayout


class FloatEncoding(LinearEncoding):
    """Weights as floats of one type.

    Args:
        dtype: the type.
        panel_terms: number of consecutive inputs of an output that are adjacent in a panel; 0: no panel
            layout.
        is_deterministic: see `LinearEncoding.is_deterministic`.
        replacements: the names of the encodings that replace this one, by device type that does not support
            it.
    """

    is_float = True
    number_format = "float"
    packs_lazily = True

    def __init__(
        self,
        dtype: DType,
        *,
        panel_terms: int = 0,
        is_deterministic: bool = True,
        replacements: Mapping[str, str] | None = None,
    ) -> None:
        self.name = dtype.value
        self.compute_dtype = self.storage_dtype = dtype
        self.bits = 8 * dtype.size_in_bytes
        self.is_deterministic = is_deterministic
        self._panel_terms = panel_terms
        self._replacements = replacements or {}

    @property
    def panels(self) -> PanelLayout | None:
        from penstock.kernels.panels import FloatPanels

        return FloatPanels(self.storage_dtype, self._panel_terms) if self._panel_terms else None

    def on_device(self, device_type: str) -> str:
        return self._replacements.get(device_type, self.name)

    def num_bytes(self, out_features: int, in_features: int) -> int:
        terms = max(self._panel_terms, 1)
        return round_up(out_features, PANEL) * round_up(in_features, terms) * self.storage_dtype.size_in_bytes

    def pack(self, weight: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
        return {"weight": weight.to(self.storage_dtype.to_torch()).contiguous()}

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight"]

    def multiply(self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        from penstock.kernels.linear import multiply_floats

        return multiply_floats(x, tensors["weight"].to(x.dtype), bias)
