"""GGUF: tensors in blocks. The block type can differ between the tensors of a file.

Matrices of the block types in `_ENCODINGS` keep their codes and scales. Other tensors are read as floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.weights.formats import CheckpointFormat, Headers, TensorReader
from penstock.weights.gguf_names import GGUFTensor
from penstock.weights.safetensors import TensorHeader

if TYPE_CHECKING:
    from torch import Tensor

_ENCODINGS = {
    "Q4_0": "int4",
    "Q4_1": "q4_1",
    "Q5_0": "int5",
    "Q5_1": "q5_1",
    "Q8_0": "uint8",
    "Q4_K": "q4_k",
    "Q5_K": "q5_k",
    "Q6_K": "q6_k",
    "MXFP4": "mxfp4",
}
"""Block type -> the encoding that represents its numbers exactly."""


class GGUFFormat(CheckpointFormat):
    """Files of the GGUF format."""

    name = "gguf"
    kept_encodings = tuple(dict.fromkeys(_ENCODINGS.values()))
    keeps_floats = True

    def detect(self, config: Mapping[str, object], headers: Headers) -> bool:
        return any(isinstance(header, GGUFTensor) for header in headers.values())

    def headers(self, config: Mapping[str, object], stored: Headers) -> Headers:
        return {
            name: replace(header, encoding=_ENCODINGS.get(header.type_name))
            if len(header.shape) == 2
            else header
            for name, header in stored.items()
        }

    def read_linear(
        self, source: TensorReader, header: TensorHeader
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        from penstock.weights.gguf_rows import gguf_rows

        assert isinstance(header, GGUFTensor)
        if header.encoding is None:
            return None, {"weight": self.read_tensor(source, header)}
        return header.encoding, gguf_rows(source.file_bytes(header), header)

    def read_tensor(self, source: TensorReader, header: TensorHeader) -> Tensor:
        from penstock.weights.gguf_tensors import gguf_tensor

        assert isinstance(header, GGUFTensor)
        return gguf_tensor(source.file_bytes(header), header)


FORMAT = GGUFFormat()
