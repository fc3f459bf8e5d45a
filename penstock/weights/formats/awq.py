"""awq: 4-bit integers in groups of inputs, with zero points.

Version ``gemm`` stores a layer ``[out, in]`` transposed: ``qweight [in, out / 8]``, ``qzeros [G, out / 8]``
and ``scales [G, out]``. A 32-bit word contains the codes of 8 outputs. From the lowest bits on, they are the
codes of the outputs 0, 2, 4, 6, 1, 3, 5 and 7.

Version ``gemv`` stores ``qweight [out, in / 8]`` with the codes in order. ``qzeros`` and ``scales`` have one
row for each output. Their columns after the last group are padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.weights.formats import Headers, TensorReader, quant_method, quantization_section
from penstock.weights.formats._codes import exact_encoding, read_codes
from penstock.weights.formats._stored import FLOATS, LayerHeader, StoredFormat, StoredTensors, unpack_bits
from penstock.weights.safetensors import TensorHeader

if TYPE_CHECKING:
    from torch import Tensor

_BITS, _CODES_PER_WORD = 4, 8
_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position in a word of the code of each output, 0 to 7."""
VERSIONS = ("gemm", "gemv")


class AWQFormat(StoredFormat):
    """4-bit codes in groups of inputs, written by AutoAWQ."""

    name = "awq"
    quant_methods = ("awq",)
    kept_encodings = ("uint4",)

    def detect(self, config: Mapping[str, object], headers: Headers) -> bool:
        return quant_method(config) in self.quant_methods

    def headers(self, config: Mapping[str, object], stored: Headers) -> Headers:
        section = quantization_section(config)
        version = str(section.get("version") or VERSIONS[0]).lower()
        if version not in VERSIONS:
            versions = " or ".join(VERSIONS)
            raise ConfigError("quantization_config.version", f"{version!r} cannot be read: use {versions}")
        bits = section.get("bits", section.get("w_bit", _BITS))
        if bits != _BITS:
            raise ConfigError(
                "quantization_config.bits", f"was {bits!r}: only AWQ weights of {_BITS} bits can be read"
            )
        group_size = section.get("group_size", section.get("q_group_size", 128))
        if not isinstance(group_size, int):
            raise ConfigError(
                "quantization_config.group_size", f"was {group_size!r}: a whole number is needed"
            )
        tensors = StoredTensors(stored, self.name)
        for layer in tensors.layers("qweight", ("I32",)):
            (_take_gemm if version == "gemm" else _take_gemv)(tensors, layer, group_size)
        return tensors.remaining

    def read_linear(
        self, source: TensorReader, header: TensorHeader
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        if not isinstance(header, LayerHeader):
            return super().read_linear(source, header)
        return (_read_gemm if header.layout == "gemm" else _read_gemv)(source, header)


FORMAT = AWQFormat()


def _group_size_and_count(
    tensors: StoredTensors, layer: str, inputs: int, group_size: int
) -> tuple[int, int]:
    """Return the number of inputs per group and the number of groups."""
    group_size = inputs if group_size < 1 else group_size
    if not inputs or inputs % group_size:
        tensors.refuse(
            layer, "qweight", f"has {inputs} inputs, which is not a multiple of group_size {group_size}"
        )
    return group_size, inputs // group_size


def _take_gemm(tensors: StoredTensors, layer: str, group_size: int) -> None:
    weight = tensors.peek(layer, "qweight")
    assert weight is not None
    if len(weight.shape) != 2:
        tensors.refuse(layer, "qweight", "must be a matrix")
    inputs, words = weight.shape
    group_size, num_groups = _group_size_and_count(tensors, layer, inputs, group_size)
    outputs = words * _CODES_PER_WORD
    parts = {
        "weight": tensors.take(layer, "qweight", ("I32",)),
        "zeros": tensors.take(layer, "qzeros", ("I32",), (num_groups, words)),
        "scales": tensors.take(layer, "scales", FLOATS, (num_groups, outputs)),
    }
    encoding = exact_encoding(_BITS, group_size, inputs)
    tensors.put(
        layer, (outputs, inputs), encoding, parts, layout="gemm", bits=_BITS, group_shape=(1, group_size)
    )


def _take_gemv(tensors: StoredTensors, layer: str, group_size: int) -> None:
    weight, zeros = tensors.peek(layer, "qweight"), tensors.peek(layer, "qzeros")
    assert weight is not None
    if len(weight.shape) != 2 or zeros is None or len(zeros.shape) != 2:
        tensors.refuse(layer, "qweight", "and qzeros must be matrices")
    assert zeros is not None
    outputs, inputs = weight.shape[0], weight.shape[1] * _CODES_PER_WORD
    group_size, num_groups = _group_size_and_count(tensors, layer, inputs, group_size)
    words_per_row = zeros.shape[1]
    if words_per_row * _CODES_PER_WORD < num_groups:
        tensors.refuse(layer, "qzeros", f"is {list(zeros.shape)} for {num_groups} groups")
    parts = {
        "weight": tensors.take(layer, "qweight", ("I32",)),
        "zeros": tensors.take(layer, "qzeros", ("I32",), (outputs, words_per_row)),
        "scales": tensors.take(layer, "scales", FLOATS, (outputs, words_per_row * _CODES_PER_WORD)),
    }
    encoding = exact_encoding(_BITS, group_size, inputs)
    tensors.put(
        layer, (outputs, inputs), encoding, parts, layout="gemv", bits=_BITS, group_shape=(1, group_size)
    )


def _read_gemm(source: TensorReader, header: LayerHeader) -> tuple[str | None, Mapping[str, Tensor]]:
    def unpack_columns(words: Tensor) -> Tensor:  # [n, out / 8] -> [out, n]
        count = words.shape[1] * _CODES_PER_WORD
        ordered = unpack_bits(words, _BITS, count).view(len(words), -1, _CODES_PER_WORD)[
            ..., list(_POSITIONS)
        ]
        return ordered.flatten(1).T.contiguous()

    codes = unpack_columns(header.read(source, "weight"))
    zeros = unpack_columns(header.read(source, "zeros"))
    scales = header.read(source, "scales").T.float()
    return read_codes(header.encoding, codes, scales, zeros, header.group_shape[1])


def _read_gemv(source: TensorReader, header: LayerHeader) -> tuple[str | None, Mapping[str, Tensor]]:
    inputs, group_size = header.shape[1], header.group_shape[1]
    codes = unpack_bits(header.read(source, "weight"), _BITS, inputs)
    zeros = unpack_bits(header.read(source, "zeros"), _BITS, inputs // group_size)
    scales = header.read(source, "scales").float()[:, : inputs // group_size]
    return read_codes(header.encoding, codes, scales, zeros, group_size)
