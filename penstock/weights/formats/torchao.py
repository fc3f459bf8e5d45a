"""torchao: 8-bit integers and 8-bit floats with a scale per output, as torchao flattens them for safetensors.

A layer has ``_weight_qdata`` and ``_weight_scale``, and for integers ``_weight_zero_point``, which is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.errors import WeightsError
from penstock.weights.formats import Headers, TensorReader, quant_method
from penstock.weights.formats._fp8 import E4M3, read_fp8
from penstock.weights.formats._stored import FLOATS, LayerHeader, StoredFormat, StoredTensors
from penstock.weights.safetensors import TensorHeader

if TYPE_CHECKING:
    from torch import Tensor

_TYPES = {"I8": "int8", E4M3: "fp8"}


class TorchAOFormat(StoredFormat):
    """8-bit integers and floats of torchao."""

    name = "torchao"
    quant_methods = ("torchao",)
    kept_encodings = ("int8", "fp8")

    def detect(self, config: Mapping[str, object], headers: Headers) -> bool:
        return quant_method(config) in self.quant_methods

    def headers(self, config: Mapping[str, object], stored: Headers) -> Headers:
        tensors = StoredTensors(stored, self.name)
        for layer in tensors.layers("_weight_qdata"):
            data = tensors.peek(layer, "_weight_qdata")
            assert data is not None
            if data.type_name not in _TYPES or len(data.shape) != 2:
                shown = f"is {data.type_name} {list(data.shape)}"
                tensors.refuse(layer, "_weight_qdata", f"{shown}: 8-bit integers and floats can be read")
            shape = (data.shape[0], data.shape[1])
            parts = {
                "weight": tensors.take(layer, "_weight_qdata", tuple(_TYPES)),
                "scale": tensors.take(layer, "_weight_scale", FLOATS, (shape[0], 1)),
                "zero": tensors.take_optional(layer, "_weight_zero_point", ("I8",), (shape[0], 1)),
            }
            encoding = _TYPES[data.type_name]
            tensors.put(layer, shape, encoding, parts, layout=encoding, bits=8, group=(1, shape[1]))
        return tensors.left

    def read_linear(
        self, source: TensorReader, header: TensorHeader
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        if not isinstance(header, LayerHeader):
            return super().read_linear(source, header)
        if header.layout == "fp8":
            return read_fp8(source, header)
        if header.part("zero") and bool(header.read(source, "zero").any()):
            raise WeightsError(
                header.file,
                f"{header.stored_name} has zero points: quantize the model with symmetric weights",
            )
        scales = header.read(source, "scale").float()
        return "int8", {"weight": header.read(source, "weight"), "scales": scales[:, 0].contiguous()}


FORMAT = TorchAOFormat()
