"""modelopt: layers of 8-bit floats and of 4-bit floats (NVFP4), written by ModelOpt.

The tensors of a layer determine its type. The layers of a checkpoint can have different types.

- Layers of 8-bit floats have ``weight`` (E4M3) and ``weight_scale`` (one per matrix or one per output).
- Layers of 4-bit floats have ``weight`` (uint8), ``weight_scale`` (E4M3, one per 16 inputs) and
  ``weight_scale_2`` (one float32).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.weights.formats import Headers, TensorReader, quant_method
from penstock.weights.formats._fp4 import read_fp4, take_fp4_layers
from penstock.weights.formats._fp8 import LAYOUT, read_fp8, take_fp8_layers
from penstock.weights.formats._stored import LayerHeader, StoredFormat, StoredTensors
from penstock.weights.safetensors import TensorHeader

if TYPE_CHECKING:
    from torch import Tensor


class ModelOptFormat(StoredFormat):
    """Layers of 8-bit and 4-bit floats, written by ModelOpt."""

    name = "modelopt"
    quant_methods = ("modelopt", "modelopt_fp4")
    kept_encodings = ("fp8", "nvfp4")

    def detect(self, config: Mapping[str, object], headers: Headers) -> bool:
        return quant_method(config) in self.quant_methods

    def headers(self, config: Mapping[str, object], stored: Headers) -> Headers:
        tensors = StoredTensors(stored, self.name)
        take_fp8_layers(tensors, (0, 0))
        take_fp4_layers(tensors, "weight")
        return tensors.remaining

    def read_linear(
        self, source: TensorReader, header: TensorHeader
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        if not isinstance(header, LayerHeader):
            return super().read_linear(source, header)
        return (read_fp8 if header.layout == LAYOUT else read_fp4)(source, header)


FORMAT = ModelOptFormat()
