"""Files of packed weights, that is, weights in the memory layout of the kernels.

``penstock warm-cache --pack`` writes one file. Loading then maps the file instead of packing the weights.
It is a safetensors file (https://huggingface.co/docs/safetensors). Its metadata describe the layers in load
order. The metadata also contain what the packed weights depend on: path, size and modification time of the
checkpoint's files, a digest of its configuration, the encoding, the memory layout and the version of
Penstock. If one of these differs, the file is not used. All processes share the pages of the file in the page
cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from penstock import __version__
from penstock.errors import WeightsError
from penstock.kernels import LinearSlice, PackedLinear
from penstock.kernels.linear import Layout, make_packed_linear
from penstock.kernels.panels import LAYOUTS_VERSION
from penstock.weights.mapping import map_in_huge_pages, read_in_huge_pages
from penstock.weights.packed_file import PackedKey
from penstock.weights.safetensors import read_header

logger = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes of a cache line; aligned vector loads do not cross cache lines
_TORCH_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I32": torch.int32,
}
_ORDER_NAME = "order"
"""The name of the tensor `PackedLinear.order` in the file."""
_TYPE_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}


def open_packed(key: PackedKey, layout: Layout) -> PackedLayerReader | None:
    """Open the file of packed weights of a checkpoint.

    Returns None if there is no file, or if the file is damaged or was written for another state of the
    checkpoint, another layout or another version of Penstock.
    """
    file = key.file
    if not file.is_file():
        return None
    try:
        header, start = _read_header(file)
    except WeightsError as problem:
        logger.warning("packed weights are not used: %s", problem)
        return None
    if header.metadata.get("made_of") != _packing_inputs(key, layout):
        logger.info("packed weights are not used: %s was written for another checkpoint or version", file)
        return None
    logger.info("packed weights are mapped from %s", file)
    content = map_in_huge_pages(file)[start:]
    tensors = {name: _view(content, entry) for name, entry in header.tensors.items()}
    layers = [_Layer.from_fields(layer) for layer in json.loads(header.metadata["layers"])]
    return PackedLayerReader(layers, tensors, layout)


class _LayerFields(TypedDict):
    """The description of a layer as JSON."""

    encoding: str
    shape: Sequence[int]
    slices: Sequence[tuple[str, int, int]]
    tensors: Sequence[str]


class _TensorFields(TypedDict):
    """The entry of a tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


@dataclass(frozen=True, slots=True)
class _FileHeader:
    """The header of a file of packed weights."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, _TensorFields]


@dataclass(frozen=True, slots=True)
class _Layer:
    """The description of a packed layer."""

    encoding: str
    shape: tuple[int, int]  # [out, in]
    slices: tuple[LinearSlice, ...]
    # The names of `PackedLinear.tensors`, and `_ORDER_NAME` if the layer has an order.
    tensor_names: tuple[str, ...]

    @classmethod
    def describe(cls, packed: PackedLinear) -> _Layer:
        shape = (packed.out_features, packed.in_features)
        return cls(packed.encoding, shape, packed.slices, tuple(_stored_tensors(packed)))

    @classmethod
    def from_fields(cls, fields: _LayerFields) -> _Layer:
        slices = tuple(LinearSlice(*part) for part in fields["slices"])
        out_features, in_features = fields["shape"]
        return cls(fields["encoding"], (out_features, in_features), slices, tuple(fields["tensors"]))

    def to_fields(self) -> _LayerFields:
        slices = [(part.name, part.start, part.stop) for part in self.slices]
        return {
            "encoding": self.encoding,
            "shape": self.shape,
            "slices": slices,
            "tensors": self.tensor_names,
        }


class PackedLayerReader:
    """Returns the layers of a file of packed weights, in load order.

    Args:
        layers: the descriptions of the layers, in load order.
        tensors: the tensors by index of the layer and name, such as ``3.panels``.
        layout: the memory layout of the layers.
    """

    def __init__(self, layers: Sequence[_Layer], tensors: Mapping[str, Tensor], layout: Layout) -> None:
        self._layers = layers
        self._layout = layout
        self._tensors = tensors
        self._next_index = 0

    def take(
        self, encoding: str, shape: tuple[int, int], bias: Tensor | None, slices: Sequence[LinearSlice]
    ) -> PackedLinear | None:
        """Return the next layer of the file, with ``bias``, and advance to the layer after it.

        Returns None if there is no next layer, or if its encoding, shape or slices differ from the arguments.
        """
        index, self._next_index = self._next_index, self._next_index + 1
        layer = self._layers[index] if index < len(self._layers) else None
        if layer is None or layer != _Layer(encoding, shape, tuple(slices), layer.tensor_names):
            return None
        tensors = {name: self._tensors[f"{index}.{name}"] for name in layer.tensor_names}
        order = tensors.pop(_ORDER_NAME, None)
        return make_packed_linear(tensors, shape, encoding, bias, layer.slices, self._layout, order)


def write_packed(key: PackedKey, packed: Sequence[PackedLinear]) -> Path:
    """Write packed layers to the file that later loads of the same checkpoint will map. Return its path.

    Raises:
        OSError: the file cannot be written.
    """
    (layout,) = {layer.layout for layer in packed}
    file = key.file
    named_tensors = [
        (f"{index}.{name}", tensor)
        for index, layer in enumerate(packed)
        for name, tensor in _stored_tensors(layer).items()
    ]
    # Tensors of unaligned size come last, so that all others start at aligned offsets.
    named_tensors.sort(key=lambda item: item[1].nbytes % _ALIGNMENT != 0)
    layers = [_Layer.describe(layer).to_fields() for layer in packed]
    tensors: dict[str, _TensorFields] = {}
    end = 0
    for name, tensor in named_tensors:
        begin, end = end, end + tensor.nbytes
        tensors[name] = {
            "dtype": _TYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    metadata = {"made_of": _packing_inputs(key, layout), "layers": json.dumps(layers)}
    text = json.dumps({"__metadata__": metadata, **tensors}).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary_file = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary_file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for _, tensor in named_tensors:
                stream.write(tensor.contiguous().view(torch.uint8).numpy().data)
        read_in_huge_pages(temporary_file)
        temporary_file.replace(file)
    finally:
        temporary_file.unlink(missing_ok=True)
    return file


def _stored_tensors(packed: PackedLinear) -> Mapping[str, Tensor]:
    order = {} if packed.order is None else {_ORDER_NAME: packed.order}
    return {**packed.tensors, **order}


def _read_header(file: Path) -> tuple[_FileHeader, int]:
    """Return the header, and the offset of the tensors in bytes.

    Raises:
        WeightsError: the file is damaged. For example, a tensor ends after the end of the file.
    """
    read_header(file)
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        entries = json.loads(stream.read(length))
    return _FileHeader(entries.pop("__metadata__", {}), entries), 8 + length


def _view(content: Tensor, entry: _TensorFields) -> Tensor:
    begin, end = entry["data_offsets"]
    return content[begin:end].view(_TORCH_DTYPES[entry["dtype"]]).view(entry["shape"])


def _packing_inputs(key: PackedKey, layout: Layout) -> str:
    """Return everything on which the packed weights depend, as JSON.

    Checkpoint files are identified by path, size and modification time, because reading their contents would
    take longer than packing.
    """
    files = sorted({file.resolve() for file in key.tensor_files})
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(key.config.encode()).hexdigest()
    return json.dumps([__version__, layout.name, LAYOUTS_VERSION, key.encoding, states, digest])
