"""Headers of GGUF files: metadata and tensor descriptions. Does not import torch.

Only `GGUFFile.floats` reads the data of a tensor.

A file consists of a header (magic, version, counts), keys with typed values, tensor descriptions, and the
aligned bytes of the tensors (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). All sizes in the
header are checked against the size of the file before memory is allocated. Errors that `_Header._fail` raises
contain the byte offset of the damage.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import NoReturn, TypeAlias

from penstock.errors import WeightsError

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # version 1 has 32-bit counts and lengths
_DEFAULT_ALIGNMENT = 32
_MAX_NAME_BYTES = 65535
_MAX_DIMS = 4  # per tensor
_MAX_STRINGS = 10_000_000  # per array; vocabularies are far smaller
_MAX_ARRAY_DEPTH = 4  # maximum nesting of arrays
_MAX_FLOATS = 65536  # maximum number of elements that `GGUFFile.floats` reads

_STRUCT_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value type number -> `struct` format, for metadata values of a fixed size."""
_FLOAT, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_MIN_BYTES = {number: struct.calcsize(f"<{code}") for number, code in _STRUCT_FORMATS.items()}
_MIN_BYTES |= {_STRING: 8, _ARRAY: 12}
"""Value type number -> minimum number of bytes of a value."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A tensor type. A block of ``num_elements`` consecutive elements takes ``num_bytes``."""

    name: str
    num_elements: int
    num_bytes: int


BLOCK_TYPES: Mapping[int, BlockType] = {
    number: BlockType(name, num_elements, num_bytes)
    for number, name, num_elements, num_bytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 40),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
    )
}
"""Tensor types of the format by number, including types that Penstock cannot read."""

BLOCK_SIZES: Mapping[str, int] = {block.name: block.num_bytes for block in BLOCK_TYPES.values()}
"""Type name -> number of bytes of a block."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The description of one tensor in a file."""

    file: Path
    name: str
    block_type: BlockType
    shape: tuple[int, ...]  # outermost dim first; the file has the reverse order
    offset: int  # bytes from the start of the file

    @property
    def num_bytes(self) -> int:
        """Number of bytes in the file."""
        return prod(self.shape) // self.block_type.num_elements * self.block_type.num_bytes


class GGUFFile:
    """A GGUF file, or the first file of a model that is split into several files.

    Opening the file checks the arrays of the metadata but does not decode them, because vocabularies have
    hundreds of thousands of entries. `array` decodes one array.

    Raises:
        WeightsError: the file cannot be read, is truncated or damaged, or is not a supported GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header = _read_header(path)
        self.metadata: Mapping[str, GGUFValue] = self._header.metadata
        """Key -> value. Arrays are represented by placeholders; `array` returns their elements."""

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors of all files of the model, by their names in the files.

        Raises:
            WeightsError: a file is missing or damaged, or the files do not belong together.
        """
        tensors = dict(self._header.tensors)
        for part in part_files(self.path)[1:]:
            for name, tensor in _read_header(part).tensors.items():
                if name in tensors:
                    raise WeightsError(part, f"contains {name}, which is also in {tensors[name].file.name}")
                tensors[name] = tensor
        count = self.metadata.get("split.tensors.count", len(tensors))
        if count != len(tensors):
            raise WeightsError(
                self.path, f"split.tensors.count is {count}, but the files have {len(tensors)} tensors"
            )
        return tensors

    def array(self, key: str) -> list[object]:
        """Return the elements of the array under ``key``; empty if the key is missing.

        Raises:
            WeightsError: the value is not an array, or the array contains text that is not UTF-8.
        """
        value = self.metadata.get(key, _NO_ARRAY)
        if not isinstance(value, _Array):
            raise WeightsError(self.path, f"{key} must be an array, is {value!r}")
        return self._header.read_array(value)

    def floats(self, name: str) -> list[float] | None:
        """Return the elements of a small F32 tensor, or None if the file has no tensor of this name.

        Raises:
            WeightsError: the tensor has another type, or more than `_MAX_FLOATS` elements.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.block_type.name != "F32" or prod(tensor.shape) > _MAX_FLOATS:
            problem = f"{name} must have at most {_MAX_FLOATS} elements of type F32"
            actual = f"{list(tensor.shape)} of type {tensor.block_type.name}"
            raise WeightsError(tensor.file, f"{problem}, was {actual}")
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.offset)
            values = struct.unpack(f"<{prod(tensor.shape)}f", stream.read(tensor.num_bytes))
        return [_shortest_decimal(value) for value in values]


_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def part_files(path: Path) -> list[Path]:
    """Return the files of a model, in order.

    If a model is split, the name of its first file ends in the number of files, such as
    ``-00001-of-00003.gguf``. With any other name, the model has one file.

    Raises:
        WeightsError: a file is missing, or ``path`` is not the first file.
    """
    match = _PART.fullmatch(path.name)
    if match is None or match["count"] == "00000":
        return [path]
    first, *_ = parts = [
        path.with_name(f"{match['stem']}-{number:05}-of-{match['count']}{SUFFIX}")
        for number in range(1, int(match["count"]) + 1)
    ]
    if path != first:
        raise WeightsError(path, f"is a later part of a model: use its first part, {first.name}")
    missing_names = [part.name for part in parts if not part.is_file()]
    if missing_names:
        raise WeightsError(
            path,
            f"{len(missing_names)} of {len(parts)} parts are missing: {', '.join(missing_names[:8])}",
        )
    return parts


@dataclass(frozen=True, slots=True)
class _Array:
    """The position of an array of the metadata. Its elements have not been decoded."""

    value_type: int  # value type number of the elements
    length: int
    start: int  # offset of its first element in the file, in bytes


_NO_ARRAY = _Array(0, 0, 0)
GGUFValue: TypeAlias = str | float | _Array  # `float` includes int and bool


def _read_header(path: Path) -> _Header:
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            if size < 24:
                raise WeightsError(path, f"is not a GGUF file: it has only {size} bytes")
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as problem:
        raise WeightsError(path, f"cannot be read: {problem.strerror}") from problem
    return _Header(path, data)


class _Header:
    """The header of one file, everything before the bytes of the tensors. The constructor parses it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._position = 0
        self._check_magic_and_version()
        num_tensors = self._read_count("tensors", 24)
        self.metadata = dict(self._read_entries(self._read_count("metadata keys", 13)))
        self.tensors = {tensor.name: tensor for tensor in self._read_tensors(num_tensors)}

    def read_array(self, array: _Array) -> list[object]:
        """Decode an array and return its elements."""
        if array.value_type in _STRUCT_FORMATS:
            code = f"<{array.length}{_STRUCT_FORMATS[array.value_type]}"
            numbers = struct.unpack_from(code, self._data, array.start)
            is_float = array.value_type == _FLOAT
            return [_shortest_decimal(number) for number in numbers] if is_float else list(numbers)
        self._position = array.start
        if array.value_type == _STRING:
            return [self._read_text() for _ in range(array.length)]
        nested_arrays = [self._skip_array(1) for _ in range(array.length)]
        return [self.read_array(nested_array) for nested_array in nested_arrays]

    def _check_magic_and_version(self) -> None:
        if self._read_bytes(4) != _MAGIC:
            raise WeightsError(self._path, "is not a GGUF file: it does not start with GGUF")
        version = self._read_integer("I")
        if version in _VERSIONS:
            return
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            raise WeightsError(self._path, "is a big-endian GGUF file: only little-endian files can be read")
        raise WeightsError(self._path, f"is of GGUF version {version}: versions 2 and 3 can be read")

    def _read_count(self, entry_kind: str, min_entry_bytes: int) -> int:
        start = self._position
        count = self._read_integer("Q")
        if count > (len(self._data) - self._position) // min_entry_bytes:
            self._fail(start, f"{count} {entry_kind} do not fit into a file of {len(self._data)} bytes")
        return count

    def _read_entries(self, count: int) -> Iterator[tuple[str, GGUFValue]]:
        keys = set()
        for _ in range(count):
            start = self._position
            key = self._read_text(_MAX_NAME_BYTES)
            if key in keys:
                self._fail(start, f"{key} appears twice")
            keys.add(key)
            yield key, self._read_value(self._read_integer("I"))

    def _read_value(self, value_type: int) -> GGUFValue:
        start = self._position
        if value_type == _STRING:
            return self._read_text()
        if value_type == _ARRAY:
            return self._skip_array(0)
        if value_type not in _STRUCT_FORMATS:
            self._fail(start - 4, f"a value has type {value_type}, which the format does not define")
        if value_type == _BOOL and self._data[start : start + 1] not in (b"\0", b"\1"):
            self._fail(start, "a boolean is neither 0 nor 1")
        value = self._read_number(_STRUCT_FORMATS[value_type])
        return _shortest_decimal(value) if value_type == _FLOAT else value

    def _skip_array(self, depth: int) -> _Array:
        """Check an array and skip it without decoding its elements."""
        start = self._position
        value_type, length = self._read_integer("I"), self._read_integer("Q")
        if value_type not in _MIN_BYTES or (value_type == _ARRAY and depth >= _MAX_ARRAY_DEPTH):
            self._fail(start, f"an array holds values of type {value_type}")
        if length > (len(self._data) - self._position) // _MIN_BYTES[value_type]:
            self._fail(
                start, f"an array of {length} values does not fit into a file of {len(self._data)} bytes"
            )
        array = _Array(value_type, length, self._position)
        if value_type in _STRUCT_FORMATS:
            self._position += length * _MIN_BYTES[value_type]
            return array
        if length > _MAX_STRINGS:
            self._fail(start, f"an array has {length} values: at most {_MAX_STRINGS} can be read")
        if value_type == _STRING:
            self._skip_texts(length)
        else:
            for _ in range(length):
                self._skip_array(depth + 1)
        return array

    def _skip_texts(self, count: int) -> None:
        position, data, size = self._position, self._data, len(self._data)
        read_length = struct.Struct("<Q").unpack_from
        for _ in range(count):  # a hot loop: most files have over 100,000 strings
            if position + 8 > size:
                self._fail(position, f"the file ends at byte {size}")
            position += 8 + read_length(data, position)[0]
        if position > size:
            self._fail(self._position, f"a string ends after the end of the file, at byte {size}")
        self._position = position

    def _read_tensors(self, count: int) -> Iterator[StoredTensor]:
        descriptions = [(self._position, *self._read_tensor_description()) for _ in range(count)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment % 8:
            raise WeightsError(self._path, f"general.alignment must be a multiple of 8, is {alignment!r}")
        data_start = -(-self._position // alignment) * alignment
        names = set()
        for start, name, block_type, shape, offset in descriptions:
            tensor = StoredTensor(self._path, name, block_type, shape, data_start + offset)
            if name in names:
                self._fail(start, f"{name} appears twice")
            names.add(name)
            if offset % alignment:
                self._fail(start, f"the offset of {name} is {offset}, not a multiple of {alignment}")
            if tensor.offset + tensor.num_bytes > len(self._data):
                raise WeightsError(
                    self._path,
                    f"is truncated: {name} ends at byte {tensor.offset + tensor.num_bytes}, "
                    f"the file at {len(self._data)}",
                )
            yield tensor

    def _read_tensor_description(self) -> tuple[str, BlockType, tuple[int, ...], int]:
        start = self._position
        name = self._read_text(_MAX_NAME_BYTES)
        num_dims = self._read_integer("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            self._fail(start, f"{name} has {num_dims} dimensions: it must have 1 to {_MAX_DIMS}")
        dims = [self._read_integer("Q") for _ in range(num_dims)]
        type_number = self._read_integer("I")
        if type_number not in BLOCK_TYPES:
            self._fail(start, f"{name} has the unknown type {type_number}")
        block_type = BLOCK_TYPES[type_number]
        if min(dims) < 1 or dims[0] % block_type.num_elements:
            self._fail(start, f"{name} of type {block_type.name} cannot have the dimensions {dims}")
        return name, block_type, tuple(reversed(dims)), self._read_integer("Q")

    def _read_text(self, max_length: int | None = None) -> str:
        start = self._position
        length = self._read_integer("Q")
        if max_length is not None and length > max_length:
            self._fail(start, f"a name has {length} bytes: at most {max_length} are allowed")
        try:
            return self._read_bytes(length).decode()
        except UnicodeDecodeError:
            self._fail(start, f"a string of {length} bytes is not UTF-8")

    def _read_integer(self, code: str) -> int:
        return int(self._read_number(code))

    def _read_number(self, code: str) -> float:
        number: float = struct.unpack(f"<{code}", self._read_bytes(struct.calcsize(f"<{code}")))[0]
        return number

    def _read_bytes(self, size: int) -> bytes:
        if size > len(self._data) - self._position:
            self._fail(self._position, f"{size} bytes expected, {len(self._data) - self._position} remain")
        self._position += size
        return self._data[self._position - size : self._position]

    def _fail(self, offset: int, problem: str) -> NoReturn:
        raise WeightsError(self._path, f"is truncated or damaged at byte {offset}: {problem}")


def _shortest_decimal(value: float) -> float:
    """Return the shortest decimal with the same float32 value, such as 1e-05 for 9.999999747378752e-06."""
    for digits in (6, 7, 8):
        shorter = float(f"{value:.{digits}g}")
        if abs(shorter) < 3.4e38 and struct.pack("<f", shorter) == struct.pack("<f", value):
            return shorter
    return value
