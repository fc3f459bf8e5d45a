"""fp8: 8-bit floats with a scale per matrix, per output or per block, written by transformers and DeepSeek.

``<layer>.weight`` is E4M3 or E5M2. ``<layer>.weight_scale_inv`` has a scale for each block of
``weight_block_size`` outputs and inputs. ``<layer>.weight_scale`` has a scale for each output, or one scale
for the whole matrix. Layers in ``modules_to_not_convert`` are plain floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.weights.formats import Headers, TensorReader, quant_method, quantization_section
from penstock.weights.formats._fp8 import block_size, read_fp8, take_fp8_layers
from penstock.weights.formats._stored import LayerHeader, StoredFormat, StoredTensors
from penstock.weights.safetensors import TensorHeader

if TYPE_CHECKING:
    from torch import Tensor


class Fp8Format(StoredFormat):
    """Layers of 8-bit floats, each with one tensor of scales."""

    name = "fp8"
    quant_methods = ("fbgemm_fp8", "fp8")
    kept_encodings = ("fp8",)

    def detect(self, config: Mapping[str, object], headers: Headers) -> bool:
        return quant_method(config) in self.quant_methods

    def headers(self, config: Mapping[str, object], stored: Headers) -> Headers:
        tensors = StoredTensors(stored, self.name)
        take_fp8_layers(tensors, block_size(quantization_section(config), "weight_block_size"))
        return tensors.remaining

    def read_linear(
        self, source: TensorReader, header: TensorHeader
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        if not isinstance(header, LayerHeader):
            return super().read_linear(source, header)
        return read_fp8(source, header)


FORMAT = Fp8Format()
