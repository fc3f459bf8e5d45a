"""Files of packed weights. A load maps the weights in the kernels' layout without packing.

``penstock warm-cache --pack`` writes the file. It is a safetensors file
(https://huggingface.co/docs/safetensors) of the layers in load order. Its metadata names the checkpoint, the
encoding and the version of Penstock; if one of them differs, the file is not used. All processes share its
pages in the page cache.
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
from penstock.kernels.linear import Layout, layer_of
from penstock.kernels.panels import LAYOUTS_VERSION
from penstock.weights.mapping import map_in_huge_pages, read_in_huge_pages
from penstock.weights.packed_file import PackedKey
from penstock.weights.safetensors import read_header

logger = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes of a cache line; aligned vector loads do not cross cache lines
_TYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I32": torch.int32,
}
_ORDER = "order"
"""Name of `PackedLinear.order` in the file."""
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def open_packed(key: PackedKey, layout: Layout) -> PackedLayerReader | None:
    """Open the packed layers of a checkpoint. Return None if no usable file exists for this layout."""
    file = key.file
    if not file.is_file():
        return None
    try:
        header, start = _read_header(file)
    except WeightsError as problem:
        logger.warning("packed weights are not used: %s", problem)
        return None
    if header.metadata.get("made_of") != _packing_inputs(key, layout):
        logger.info("packed weights are not used: %s is of another checkpoint or version", file)
        return None
    logger.info("packed weights are mapped from %s", file)
    content = map_in_huge_pages(file)[start:]
    tensors = {name: _view(content, entry) for name, entry in header.tensors.items()}
    layers = [_Layer.parsed(one) for one in json.loads(header.metadata["layers"])]
    return PackedLayerReader(layers, tensors, layout)


class _LayerFields(TypedDict):
    """A layer as JSON."""

    encoding: str
    shape: Sequence[int]
    slices: Sequence[tuple[str, int, int]]
    tensors: Sequence[str]


class _TensorFields(TypedDict):
    """An entry of a safetensors header."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


@dataclass(frozen=True, slots=True)
class _FileHeader:
    """The header of a file."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, _TensorFields]


@dataclass(frozen=True, slots=True)
class _Layer:
    """The description of a layer in the file."""

    encoding: str
    shape: tuple[int, int]  # [out, in]
    slices: tuple[LinearSlice, ...]
    tensors: tuple[str, ...]  # names in `PackedLinear.tensors`, and perhaps `_ORDER`

    @classmethod
    def of(cls, packed: PackedLinear) -> _Layer:
        shape = (packed.out_features, packed.in_features)
        return cls(packed.encoding, shape, packed.slices, tuple(_tensors_of(packed)))

    @classmethod
    def parsed(cls, fields: _LayerFields) -> _Layer:
        slices = tuple(LinearSlice(*part) for part in fields["slices"])
        out_features, in_features = fields["shape"]
        return cls(fields["encoding"], (out_features, in_features), slices, tuple(fields["tensors"]))

    def fields(self) -> _LayerFields:
        slices = [(part.name, part.start, part.stop) for part in self.slices]
        return {
            "encoding": self.encoding,
            "shape": self.shape,
            "slices": slices,
            "tensors": self.tensors,
        }


class PackedLayerReader:
    """Returns layers that were packed before, in load order.

    Args:
        layers: descriptions of the layers.
        tensors: tensors by index and name, such as ``3.panels``.
        layout: their memory layout.
    """

    def __init__(self, layers: Sequence[_Layer], tensors: Mapping[str, Tensor], layout: Layout) -> None:
        self._layers = layers
        self._layout = layout
        self._tensors = tensors
        self._next = 0

    def take(
        self, encoding: str, shape: tuple[int, int], bias: Tensor | None, slices: Sequence[LinearSlice]
    ) -> PackedLinear | None:
        place, self._next = self._next, self._next + 1
        layer = self._layers[place] if place < len(self._layers) else None
        if layer is None or layer != _Layer(encoding, shape, tuple(slices), layer.tensors):
            return None
        tensors = {name: self._tensors[f"{place}.{name}"] for name in layer.tensors}
        order = tensors.pop(_ORDER, None)
        return layer_of(tensors, shape, encoding, bias, layer.slices, self._layout, order)


def write_packed(key: PackedKey, packed: Sequence[PackedLinear]) -> Path:
    """Write packed layers to the file that later loads of the same checkpoint map, and return its path.

    Raises:
        OSError: the file cannot be written.
    """
    (layout,) = {layer.layout for layer in packed}
    file = key.file
    named = [
        (f"{place}.{name}", tensor)
        for place, layer in enumerate(packed)
        for name, tensor in _tensors_of(layer).items()
    ]
    named.sort(key=lambda item: item[1].nbytes % _ALIGNMENT != 0)  # tensors of unaligned size come last
    layers = [_Layer.of(layer).fields() for layer in packed]
    tensors: dict[str, _TensorFields] = {}
    end = 0
    for name, tensor in named:
        begin, end = end, end + tensor.nbytes
        tensors[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    metadata = {"made_of": _packing_inputs(key, layout), "layers": json.dumps(layers)}
    text = json.dumps({"__metadata__": metadata, **tensors}).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for _, tensor in named:
                stream.write(tensor.contiguous().view(torch.uint8).numpy().data)
        read_in_huge_pages(unfinished)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    return file


def _tensors_of(packed: PackedLinear) -> Mapping[str, Tensor]:
    order = {} if packed.order is None else {_ORDER: packed.order}
    return {**packed.tensors, **order}


def _read_header(file: Path) -> tuple[_FileHeader, int]:
    """Return the header and the offset of the tensors.

    Raises:
        WeightsError: the file is damaged: tensors lie outside it or do not match their shapes.
    """
    read_header(file)
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        entries = json.loads(stream.read(length))
    return _FileHeader(entries.pop("__metadata__", {}), entries), 8 + length


def _view(content: Tensor, entry: _TensorFields) -> Tensor:
    begin, end = entry["data_offsets"]
    return content[begin:end].view(_TYPES[entry["dtype"]]).view(entry["shape"])


def _packing_inputs(key: PackedKey, layout: Layout) -> str:
    """Return all inputs of packing, as JSON.

    Checkpoint files are compared by path, size and modification time. Reading their contents would take
    longer than packing.
    """
    files = sorted({file.resolve() for file in key.tensor_files})
    states = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(key.config.encode()).hexdigest()
    return json.dumps([__version__, layout.name, LAYOUTS_VERSION, key.encoding, states, digest])
