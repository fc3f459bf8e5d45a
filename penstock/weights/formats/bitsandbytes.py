"""bitsandbytes: 4-bit indices into a table of values (nf4, fp4), and 8-bit integers with a scale per output.

A 4-bit layer has these tensors:

* ``weight`` uint8: two indices in a byte, the first in its upper half.
* ``weight.quant_map``: the table of 16 values.
* ``weight.absmax``: a factor for each block of the flattened weight. The factors can be quantized, too: to
  8-bit indices into ``weight.nested_quant_map``, with the factors ``weight.nested_absmax`` and an offset.
* ``weight.quant_state.bitsandbytes__nf4`` (or ``fp4``): JSON text with the shape, the block sizes and the
  offset.

The encodings nf4 and fp4 represent a 4-bit layer exactly if the block size and the number of inputs are
multiples of 64, and the table is that of the encoding. All other 4-bit layers are dequantized.

An 8-bit layer has ``weight`` int8 and ``SCB``, which is 127 times the scale of each output.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.kernels.encodings import fp4, nf4
from penstock.weights.formats import Headers, TensorReader, quant_method
from penstock.weights.formats._stored import LayerHeader, StoredFormat, StoredTensors
from penstock.weights.safetensors import TensorHeader, read_tensor_bytes

if TYPE_CHECKING:
    from torch import Tensor

_STATE_PREFIX = "weight.quant_state.bitsandbytes__"
_TABLES = {"nf4": nf4.NUMBERS, "fp4": fp4.NUMBERS}
_TABLE_TOLERANCE = 1e-6  # writers may round the float32 numbers of a table differently
_GROUP_SIZE = 64  # inputs that share a scale in the encodings nf4 and fp4
_MAX_STATE_BYTES = 10_000
"""Maximum number of bytes of the JSON text of a layer."""


@dataclass(frozen=True, slots=True)
class _State:
    shape: tuple[int, int]
    block_size: int  # consecutive weights that share a factor
    nested_block_size: int  # consecutive factors that share a nested factor
    nested_offset: float  # added to each dequantized factor


@dataclass(frozen=True, slots=True)
class _FourBitHeader(LayerHeader):
    state: _State = _State((0, 0), 1, 1, 0.0)


class BitsAndBytesFormat(StoredFormat):
    """4-bit and 8-bit layers of bitsandbytes."""

    name = "bitsandbytes"
    quant_methods = ("bitsandbytes",)
    kept_encodings = ("nf4", "fp4", "int8")

    def detect(self, config: Mapping[str, object], headers: Headers) -> bool:
        return quant_method(config) in self.quant_methods

    def headers(self, config: Mapping[str, object], stored: Headers) -> Headers:
        tensors = StoredTensors(stored, self.name)
        for encoding in _TABLES:
            for layer in list(tensors.layers(f"{_STATE_PREFIX}{encoding}", ("U8",))):
                _take_4_bits(tensors, layer, encoding)
        for layer in tensors.layers("SCB"):
            weight = tensors.peek(layer, "weight")
            if weight is None or len(weight.shape) != 2:
                tensors.refuse(layer, "SCB", "needs a weight that is a matrix")
            assert weight is not None
            shape = (weight.shape[0], weight.shape[1])
            parts = {
                "weight": tensors.take(layer, "weight", ("I8",)),
                "scale": tensors.take(layer, "SCB", ("F32",), (shape[0],)),
            }
            tensors.take_optional(layer, "weight_format", ("U8",))
            tensors.put(layer, shape, "int8", parts, bits=8)
        return tensors.remaining

    def read_linear(
        self, source: TensorReader, header: TensorHeader
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        if isinstance(header, _FourBitHeader):
            return header.encoding, _read_4_bits(source, header)
        if not isinstance(header, LayerHeader):
            return super().read_linear(source, header)
        scales = header.read(source, "scale") / 127
        return "int8", {"weight": header.read(source, "weight"), "scales": scales}


FORMAT = BitsAndBytesFormat()


def _take_4_bits(tensors: StoredTensors, layer: str, encoding: str) -> None:
    state_name = f"{_STATE_PREFIX}{encoding}"
    weight, state_header = tensors.peek(layer, "weight"), tensors.peek(layer, state_name)
    assert state_header is not None
    state = (
        None if state_header.num_bytes > _MAX_STATE_BYTES else _parse_state(read_tensor_bytes(state_header))
    )
    if state is None:
        tensors.refuse(layer, state_name, "is damaged: it must have the shape of a matrix and a blocksize")
    assert state is not None
    outputs, inputs = state.shape
    num_blocks = -(-outputs * inputs // state.block_size)
    num_bytes = -(-outputs * inputs // 2)
    nested = tensors.peek(layer, "weight.nested_absmax")
    if weight is not None and weight.num_elements != num_bytes:
        tensors.refuse(layer, "weight", f"has {weight.num_elements} bytes for {list(state.shape)}")
    parts = {
        "weight": tensors.take(layer, "weight", ("U8", "I8")),
        "table": tensors.take(layer, "weight.quant_map", ("F32",), (16,)),
        "factors": tensors.take(
            layer, "weight.absmax", ("F32",) if nested is None else ("U8",), (num_blocks,)
        ),
    }
    if nested is not None:
        num_nested_blocks = -(-num_blocks // state.nested_block_size)
        parts["nested_factors"] = tensors.take(layer, "weight.nested_absmax", ("F32",), (num_nested_blocks,))
        parts["nested_table"] = tensors.take(layer, "weight.nested_quant_map", ("F32",), (256,))
    tensors.take(layer, state_name, ("U8",))
    tensors.remaining[f"{layer}.weight"] = _FourBitHeader(
        parts["weight"].file,
        "bitsandbytes",
        state.shape,
        sum(part.num_bytes for part in (*parts.values(), state_header)),
        parts["weight"].stored_name,
        encoding=encoding if _is_exact(encoding, state, parts["table"]) else None,
        parts=tuple(parts.values()),
        part_names=tuple(parts),
        state=state,
    )


def _parse_state(text: bytes) -> _State | None:
    """Return the shape and block sizes of a 4-bit layer from its JSON text; None if the text is damaged."""
    try:
        fields = json.loads(text)
        outputs, inputs = fields["shape"]
        block_size, nested_block_size = fields["blocksize"], fields.get("nested_blocksize", 256)
        sizes = (outputs, inputs, block_size, nested_block_size)
        if not all(isinstance(size, int) and 0 < size < 2**31 for size in sizes):
            return None
        nested_offset = float(fields.get("nested_offset", 0.0))
        return _State((outputs, inputs), block_size, nested_block_size, nested_offset)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _is_exact(encoding: str, state: _State, table: TensorHeader) -> bool:
    """Return whether the encoding ``encoding`` represents a layer exactly."""
    if state.shape[1] % _GROUP_SIZE or state.block_size % _GROUP_SIZE:
        return False
    numbers = struct.unpack("<16f", read_tensor_bytes(table))
    return all(abs(a - b) < _TABLE_TOLERANCE for a, b in zip(numbers, _TABLES[encoding], strict=True))


def _read_4_bits(source: TensorReader, header: _FourBitHeader) -> Mapping[str, Tensor]:
    """Return the tensors of a 4-bit layer in the header's encoding, or its float weight if that is None."""
    import torch

    state, factors = header.state, header.read(source, "factors")
    if header.part("nested_factors"):
        nested_factors = header.read(source, "nested_factors")
        nested_factors = nested_factors.repeat_interleave(state.nested_block_size)[: len(factors)]
        factors = header.read(source, "nested_table")[factors.int()] * nested_factors + state.nested_offset
    packed = header.read(source, "weight").view(torch.uint8).flatten()
    indices = torch.stack([packed >> 4, packed & 15], dim=1).flatten()
    num_weights = state.shape[0] * state.shape[1]
    if header.encoding is not None:
        scales = factors.repeat_interleave(state.block_size // _GROUP_SIZE)[: num_weights // _GROUP_SIZE]
        return {"weight": indices.view(state.shape), "scales": scales.view(state.shape[0], -1)}
    numbers = header.read(source, "table")[indices.int()][:num_weights]
    return {"weight": (numbers * factors.repeat_interleave(state.block_size)[:num_weights]).view(state.shape)}
