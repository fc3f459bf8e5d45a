"""torchao: integers of up to 8 bits and 8-bit floats, in torchao's flattened safetensors form.

A layer has the tensors ``_weight_qdata`` and ``_weight_scale``. A layer of integers may also have
``_weight_zero_point``; a layer of class ``Int4Tensor`` must have it. The metadata of a file contain the class
of each weight:

* ``Int8Tensor`` and ``Float8Tensor``: 8-bit integers or floats ``[out, in]`` with a scale for each output.
* ``IntxUnpackedToInt8Tensor``: integers of 1 to 8 bits, each in a byte, with scales and integer zero points
  ``[out, G]``. A weight is ``(integer - zero) * scale``.
* ``Int4Tensor``: signed 4-bit integers ``[out, in / 2]``, two in a byte, the first in its lower half. Scales
  and zero points are floats ``[G, out]``. A weight is ``integer * scale + zero``.

Classes that are packed for one kind of device (such as ``Int4TilePackedTo4dTensor``) cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.errors import WeightsError
from penstock.weights.formats import Headers, TensorReader, quant_method
from penstock.weights.formats._codes import exact_encoding, read_codes
from penstock.weights.formats._fp8 import E4M3, LAYOUT, read_fp8
from penstock.weights.formats._stored import (
    FLOATS,
    GROUP_SIZE_MULTIPLE,
    LayerHeader,
    StoredFormat,
    StoredTensors,
)
from penstock.weights.safetensors import TensorHeader, read_metadata, read_tensor_bytes

if TYPE_CHECKING:
    from torch import Tensor

_DATA, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_INT4_CLASS = "Int4Tensor"
_READABLE_CLASSES = ("Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor", _INT4_CLASS)
_INT4_ENCODING = "q4_z"


class TorchAOFormat(StoredFormat):
    """Layers of integers and 8-bit floats, written by torchao."""

    name = "torchao"
    quant_methods = ("torchao",)
    kept_encodings = ("int8", "fp8", "uint4", "uint8", _INT4_ENCODING)

    def detect(self, config: Mapping[str, object], headers: Headers) -> bool:
        return quant_method(config) in self.quant_methods

    def headers(self, config: Mapping[str, object], stored: Headers) -> Headers:
        tensors, descriptions = StoredTensors(stored, self.name), _descriptions(stored)
        for layer in tensors.layers(_DATA):
            data, scale = tensors.peek(layer, _DATA), tensors.peek(layer, _SCALE)
            assert data is not None
            description = descriptions.get(data.stored_name.replace(f".{_DATA}", ".weight"), {})
            weight_class = description.get("_type")
            is_matrix = len(data.shape) == 2 and 0 not in data.shape
            is_readable = weight_class in (None, *_READABLE_CLASSES) and data.type_name in ("I8", "U8", E4M3)
            if not is_readable or not is_matrix:
                problem = f"is {weight_class or ''} {data.type_name} {list(data.shape)}".replace("  ", " ")
                tensors.refuse(layer, _DATA, f"{problem}: {' and '.join(_READABLE_CLASSES)} can be read")
            if tensors.peek(layer, "_weight_act_pre_scale") is not None:
                tensors.refuse(
                    layer, _DATA, "needs scaled activations (act_pre_scale), which are not supported"
                )
            if data.type_name == E4M3:
                _take_floats(tensors, layer)
            elif weight_class == _INT4_CLASS or (weight_class is None and _is_packed(data, scale)):
                _take_packed(tensors, layer)
            else:
                _take_integers(tensors, layer, _num_bits(description))
        return tensors.remaining

    def read_linear(
        self, source: TensorReader, header: TensorHeader
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        if not isinstance(header, LayerHeader):
            return super().read_linear(source, header)
        readers = {LAYOUT: read_fp8, _INT4_CLASS: _read_packed, "rows": _read_rows}
        return readers.get(header.layout, _read_groups)(source, header)


FORMAT = TorchAOFormat()


def _descriptions(stored: Headers) -> Mapping[str, Mapping[str, object]]:
    """Return the description of each weight from the metadata of all files, by its stored name."""
    descriptions: dict[str, Mapping[str, object]] = {}
    for file in {header.file for header in stored.values()}:
        for name, text in read_metadata(file).items():
            try:
                description = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(description, dict):
                descriptions[name] = description
    return descriptions


def _num_bits(description: Mapping[str, object]) -> int:
    """Return the number of bits of a weight's integers; 8 if the metadata have no smaller number."""
    data = description.get("_data")
    dtype = data.get("target_dtype") if isinstance(data, dict) else None
    name = dtype.get("_data") if isinstance(dtype, dict) else None
    return int(name[3:]) if name in [f"int{bits}" for bits in range(1, 8)] else 8


def _is_packed(data: TensorHeader, scale: TensorHeader | None) -> bool:
    """Return whether a weight without metadata has two integers in a byte, by its transposed scales."""
    shape = scale.shape if scale else ()
    return len(shape) == 2 and shape[0] != data.shape[0] and shape[1] == data.shape[0]


def _take_floats(tensors: StoredTensors, layer: str) -> None:
    data = tensors.take(layer, _DATA, (E4M3,))
    shape = (data.shape[0], data.shape[1])
    parts = {"weight": data, "scale": tensors.take(layer, _SCALE, FLOATS, (shape[0], 1))}
    tensors.put(layer, shape, "fp8", parts, layout=LAYOUT, bits=8, group_shape=(1, shape[1]))


def _num_groups(tensors: StoredTensors, layer: str, inputs: int, *, axis: int) -> int:
    """Return the number of groups, the size of ``axis`` of the scales; 1 if the scales are not a matrix.

    Raises:
        WeightsError: the groups do not divide the inputs.
    """
    scale = tensors.peek(layer, _SCALE)
    num_groups = scale.shape[axis] if scale is not None and len(scale.shape) == 2 else 1
    if not num_groups or inputs % num_groups:
        tensors.refuse(layer, _SCALE, f"has {num_groups} groups for {inputs} inputs")
    return num_groups


def _take_integers(tensors: StoredTensors, layer: str, bits: int) -> None:
    data = tensors.take(layer, _DATA, ("I8",))
    outputs, inputs = data.shape
    num_groups = _num_groups(tensors, layer, inputs, axis=1)
    parts = {
        "weight": data,
        "scale": tensors.take(layer, _SCALE, FLOATS, (outputs, num_groups)),
        "zero": tensors.take_optional(layer, _ZERO, ("I8",), (outputs, num_groups)),
    }
    zero, group_size = parts["zero"], inputs // num_groups
    has_zero_points = zero is not None and any(read_tensor_bytes(zero)) if num_groups == 1 else True
    if bits == 8 and num_groups == 1 and not has_zero_points:
        tensors.put(layer, (outputs, inputs), "int8", parts, layout="rows", bits=8, group_shape=(1, inputs))
        return
    encoding = exact_encoding(bits, group_size, inputs)
    tensors.put(
        layer, (outputs, inputs), encoding, parts, layout="groups", bits=bits, group_shape=(1, group_size)
    )


def _take_packed(tensors: StoredTensors, layer: str) -> None:
    data = tensors.take(layer, _DATA, ("I8", "U8"))
    outputs, inputs = data.shape[0], 2 * data.shape[1]
    num_groups = _num_groups(tensors, layer, inputs, axis=0)
    parts = {
        "weight": data,
        "scale": tensors.take(layer, _SCALE, FLOATS, (num_groups, outputs)),
        "zero": tensors.take(layer, _ZERO, FLOATS, (num_groups, outputs)),
    }
    group_size = inputs // num_groups
    encoding = _INT4_ENCODING if group_size % GROUP_SIZE_MULTIPLE == 0 or num_groups == 1 else None
    tensors.put(
        layer, (outputs, inputs), encoding, parts, layout=_INT4_CLASS, bits=4, group_shape=(1, group_size)
    )


def _read_rows(source: TensorReader, header: LayerHeader) -> tuple[str | None, Mapping[str, Tensor]]:
    scales = header.read(source, "scale").float()[:, 0].contiguous()
    return header.encoding, {"weight": header.read(source, "weight"), "scales": scales}


def _read_groups(source: TensorReader, header: LayerHeader) -> tuple[str | None, Mapping[str, Tensor]]:
    import torch

    weight, scales = header.read(source, "weight"), header.read(source, "scale").float()
    code_offset = 8 if header.bits <= 4 else 128  # a code is an integer plus this offset
    codes = weight.short() + code_offset
    if header.part("zero"):
        zeros = header.read(source, "zero").int() + code_offset
    else:
        zeros = torch.full(scales.shape, code_offset)
    if not 0 <= int(codes.min()) <= int(codes.max()) < 2 * code_offset or int(zeros.min()) < 0:
        low, high, zero = int(weight.min()), int(weight.max()), int(zeros.min()) - code_offset
        raise WeightsError(
            header.file,
            f"{header.stored_name} has integers from {low} to {high} and a smallest zero point of {zero}, "
            f"which do not fit into {header.bits} bits",
        )
    return read_codes(header.encoding, codes.to(torch.uint8), scales, zeros, header.group_shape[1])


def _read_packed(source: TensorReader, header: LayerHeader) -> tuple[str | None, Mapping[str, Tensor]]:
    import torch

    from penstock.kernels.codes import split_scales

    packed, group_size = header.read(source, "weight").view(torch.uint8), header.group_shape[1]
    codes = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1) ^ 8  # signed -> offset by 8
    scales, zeros = (header.read(source, name).T.float() for name in ("scale", "zero"))
    if header.encoding is None:
        input_scales, input_zeros = (
            group_values.repeat_interleave(group_size, 1) for group_values in (scales, zeros)
        )
        return None, {"weight": (codes.float() - 8) * input_scales + input_zeros}
    float16_values, row_scales = split_scales(torch.cat([scales, zeros], dim=1))
    num_groups = -(-codes.shape[1] // GROUP_SIZE_MULTIPLE)
    repeats = num_groups if group_size >= codes.shape[1] else group_size // GROUP_SIZE_MULTIPLE
    block_scales, minima = (values.repeat_interleave(repeats, 1) for values in float16_values.chunk(2, dim=1))
    return header.encoding, {
        "weight": codes,
        "scales": block_scales,
        "minima": -minima,
        "row_scales": row_scales,
    }
