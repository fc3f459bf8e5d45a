"""Headers of safetensors files. Does not import torch. Only `read_tensor_bytes` reads data of a tensor.

A file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, byte range) and the
tensors' bytes (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NoReturn, TypedDict

from penstock.dtype import DType
from penstock.errors import WeightsError
from penstock.weights.json_files import read_json_object
from penstock.weights.names import plain_names

_MAX_HEADER_BYTES = 100_000_000
"""Maximum length of a header in the format."""
SINGLE_FILE = "model.safetensors"
SHARD_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """The description of one tensor in a file."""

    file: Path
    type_name: str
    """The type in the format's notation: F32, BF16, F8_E4M3."""
    shape: tuple[int, ...]
    num_bytes: int
    stored_name: str
    """The name in the file."""
    encoding: str | None = None
    """The quantization encoding in which a linear layer is stored; None for plain numbers."""
    is_transposed: bool = False
    """Whether `shape` is ``[in, out]`` although the file stores one row per output."""
    offset: int = 0
    """Number of bytes from the start of the file to the tensor."""

    @property
    def dtype(self) -> DType | None:
        """The element type; None for types without a `DType`, such as 8-bit floats."""
        return _DTYPES.get(self.type_name)

    @property
    def is_float(self) -> bool:
        """Whether the tensor can be read as floats."""
        return self.encoding is not None or (self.dtype is not None and self.dtype.is_float())

    @property
    def is_dequantized(self) -> bool:
        """Whether the tensor is quantized, but dequantized on reading because no encoding matches."""
        return False

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class QuantizedHeader(TensorHeader):
    """A weight that a checkpoint format assembles from several stored tensors."""

    parts: tuple[TensorHeader, ...] = ()
    """The stored tensors."""
    index: int | None = None
    """Index of the weight in the first dim of all parts; None if the parts contain only this weight."""
    float_dtype: DType = DType.bfloat16
    """The nominal float type of the weight, for loads without data. Read floats may have another type."""
    input_order: bytes = b""
    """Permutation of the inputs as int32: column c in the encoding is input ``input_order[c]``.

    It is empty if the inputs are in the original order.
    """

    @property
    def dtype(self) -> DType:
        """The nominal float type of the weight, see `float_dtype`."""
        return self.float_dtype

    @property
    def is_dequantized(self) -> bool:
        return self.encoding is None


def read_checkpoint_headers(path: Path) -> dict[str, TensorHeader]:
    """Return the tensors of a checkpoint by their plain names (see `plain_names`).

    If two tensors have the same plain name, all tensors keep their names in the files.

    Args:
        path: a safetensors file, a folder with one file, or a folder with shards and their index.

    Raises:
        WeightsError: there is no safetensors file, there are several without an index, a shard or a listed
            tensor is missing, or a file is damaged.
    """
    headers = _read_files(path)
    names = plain_names(headers)
    if len(set(names.values())) < len(names):  # keep the stored names, so that no tensor is lost
        return headers
    return {names[name]: header for name, header in headers.items()}


def _read_files(path: Path) -> dict[str, TensorHeader]:
    if path.is_file():
        return read_header(path)
    if (path / SINGLE_FILE).is_file():
        return read_header(path / SINGLE_FILE)
    if (path / SHARD_INDEX).is_file():
        return _read_shards(path)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return read_header(files[0])
    if files:
        raise WeightsError(path, f"has {len(files)} safetensors files but no {SHARD_INDEX}")
    raise WeightsError(path, "has no safetensors file")


def read_header(file: Path) -> dict[str, TensorHeader]:
    """Return the tensors of one safetensors file by name.

    Raises:
        WeightsError: the file cannot be read, is truncated, or is not a safetensors file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            text = stream.read(length) if 8 + length <= size else b""
    except OSError as problem:
        raise WeightsError(file, f"cannot be read: {problem.strerror}") from problem
    if size < 8:
        raise WeightsError(file, f"is not a safetensors file: it has only {size} bytes")
    if 8 + length > size:
        _refuse_length(file, length, size)
    return _parse_header(file, text, size - 8 - length)


def read_metadata(file: Path) -> dict[str, str]:
    """Return the ``__metadata__`` of a safetensors file, name -> text. Values other than texts are left out.

    Raises:
        WeightsError: the file cannot be read, or its ``__metadata__`` is not a JSON object.
    """
    try:
        with file.open("rb") as stream:
            length = min(int.from_bytes(stream.read(8), "little"), _MAX_HEADER_BYTES)
            entries = json.loads(stream.read(length))
    except (OSError, ValueError, RecursionError) as problem:
        raise WeightsError(file, f"cannot be read: {problem}") from problem
    metadata = entries.get("__metadata__") if isinstance(entries, dict) else None
    if not isinstance(metadata, dict | None):
        raise WeightsError(file, "cannot be read: __metadata__ is not a JSON object")
    if metadata is None:
        return {}
    return {name: text for name, text in metadata.items() if isinstance(text, str)}


def read_tensor_bytes(header: TensorHeader) -> bytes:
    """Return the content of a small tensor of a safetensors file.

    Raises:
        WeightsError: the file cannot be read.
    """
    try:
        with header.file.open("rb") as stream:
            stream.seek(header.offset)
            return stream.read(header.num_bytes)
    except OSError as problem:
        raise WeightsError(header.file, f"{header.stored_name} cannot be read: {problem}") from problem


def _refuse_length(file: Path, length: int, size: int) -> NoReturn:
    # In a file of another format, the first 8 bytes are usually a number above `_MAX_HEADER_BYTES`.
    if length > _MAX_HEADER_BYTES:
        raise WeightsError(file, "is not a safetensors file: its first 8 bytes are not a header length")
    raise WeightsError(file, f"is truncated in its header: {8 + length} bytes expected, {size} present")


def _parse_header(file: Path, text: bytes, data_size: int) -> dict[str, TensorHeader]:
    try:
        entries = json.loads(text)
        metadata = entries.pop("__metadata__", None) or {}
        start = 8 + len(text)
        headers = {name: _tensor_header(file, name, entry, start) for name, entry in entries.items()}
        # If tensors share storage, some programs store only one of them. The metadata then map each other
        # name to the stored name.
        headers |= {
            name: headers[stored_name]
            for name, stored_name in metadata.items()
            if name not in headers and isinstance(stored_name, str) and stored_name in headers
        }
        ranges = sorted(tuple(entry["data_offsets"]) for entry in entries.values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise WeightsError(file, "is not a safetensors file: its header is damaged") from problem
    tensor_bytes = ranges[-1][1] if ranges else 0
    if tensor_bytes > data_size:
        raise WeightsError(
            file, f"is truncated: {tensor_bytes} bytes of tensors expected, {data_size} present"
        )
    if tensor_bytes < data_size or any(end != start for (_, end), (start, _) in pairwise([(0, 0), *ranges])):
        raise WeightsError(file, "is not a safetensors file: there are gaps between its tensors")
    return headers


class _Entry(TypedDict):
    """The entry of a tensor in the header of a file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _tensor_header(file: Path, name: str, entry: _Entry, start: int) -> TensorHeader:
    shape = tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    header = TensorHeader(file, entry["dtype"], shape, end - begin, name, offset=start + begin)
    if not all(isinstance(size, int) and size >= 0 for size in (*shape, begin, end - begin)):
        raise ValueError("a shape or a byte range contains a value that is not a whole number of at least 0")
    if header.dtype and header.num_elements * header.dtype.size_in_bytes != header.num_bytes:
        raise ValueError("the size of a byte range does not match the shape")
    return header


def _read_shards(folder: Path) -> dict[str, TensorHeader]:
    index = folder / SHARD_INDEX
    weight_map = read_json_object(index, WeightsError).get("weight_map")
    if not isinstance(weight_map, dict):
        raise WeightsError(index, "has no weight_map from tensor names to files")
    headers: dict[str, TensorHeader] = {}
    for file in _shards(index, weight_map):
        headers |= read_header(file)
    missing_tensors = [name for name in weight_map if name not in headers]
    if missing_tensors:
        name = missing_tensors[0]
        raise WeightsError(
            index,
            f"lists {name} in {weight_map[name]}, but the tensor is not in that file "
            f"({len(missing_tensors)} tensors are missing)",
        )
    return headers


def _shards(index: Path, weight_map: Mapping[str, object]) -> Iterator[Path]:
    names = sorted({str(name) for name in weight_map.values()})
    outside_names = [name for name in names if Path(name).name != name]
    if outside_names:
        raise WeightsError(index, f"refers to {outside_names[0]!r}, which is not a file in the same folder")
    missing_names = [name for name in names if not (index.parent / name).is_file()]
    if missing_names:
        raise WeightsError(
            index, f"{len(missing_names)} of {len(names)} shards are missing: {', '.join(missing_names[:8])}"
        )
    return (index.parent / name for name in names)


_DTYPES = {
    "BOOL": DType.bool,
    "U8": DType.uint8,
    "I8": DType.int8,
    "I16": DType.int16,
    "I32": DType.int32,
    "I64": DType.int64,
    "F16": DType.float16,
    "BF16": DType.bfloat16,
    "F32": DType.float32,
    "F64": DType.float64,
}
