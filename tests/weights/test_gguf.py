"""Headers of valid, damaged and split GGUF files, and the table of block types."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian, GGUFValueType, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from support.gguf_files import write_and_close

from penstock.errors import WeightsError
from penstock.weights.gguf import BLOCK_TYPES, GGUFFile

_STRING, _ARRAY, _U32 = 8, 9, 4


def write_gguf_file(
    file: Path,
    tensors: Mapping[str, np.ndarray] | None = None,
    metadata: Mapping[str, tuple[Any, GGUFValueType]] | None = None,
    **options: Any,
) -> Path:
    writer = GGUFWriter(file, "llama", **options)
    for key, (value, value_type) in (metadata or {}).items():
        writer.add_key_value(key, value, value_type)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    write_and_close(writer)
    return file


def encode_string(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def make_gguf_bytes(
    entries: list[bytes] = (), tensors: list[bytes] = (), *, version: int = 3, data: bytes = b""
) -> bytes:  # type: ignore[assignment]
    """Return the bytes of a GGUF file with these metadata entries and tensor descriptions."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries))
    header += b"".join([*entries, *tensors])
    return header + bytes(-len(header) % 32) + data


def make_tensor_description(name: str, dims: list[int], type_number: int = 0, offset: int = 0) -> bytes:
    return encode_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_number, offset)


VALUES = {
    "u8": (200, GGUFValueType.UINT8),
    "i8": (-5, GGUFValueType.INT8),
    "u16": (60000, GGUFValueType.UINT16),
    "i16": (-300, GGUFValueType.INT16),
    "u32": (2**32 - 1, GGUFValueType.UINT32),
    "i32": (-7, GGUFValueType.INT32),
    "f32": (1e-5, GGUFValueType.FLOAT32),
    "true": (True, GGUFValueType.BOOL),
    "false": (False, GGUFValueType.BOOL),
    "text": ("caf\u00e9 ▁", GGUFValueType.STRING),
    "u64": (2**64 - 1, GGUFValueType.UINT64),
    "i64": (-(2**63), GGUFValueType.INT64),
    "f64": (0.1, GGUFValueType.FLOAT64),
}
ARRAYS = {
    "numbers": [1, 2, 3],
    "floats": [0.5, 1e-5, -3.25],
    "texts": ["a", "", "▁the"],
    "flags": [True, False],
    "nested": [[1, 2], [3]],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    arrays = {key: (value, GGUFValueType.ARRAY) for key, value in ARRAYS.items()}
    tensors = {
        "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b.weight": np.arange(6, dtype=np.float16).reshape(1, 2, 3),
        "rope_freqs.weight": np.array([1.0, 0.1, 8.0], dtype=np.float32),
    }
    return write_gguf_file(tmp_path / "a.gguf", tensors, VALUES | arrays)


def test_metadata_of_every_type_is_read(file: Path) -> None:
    gguf_file = GGUFFile(file)
    assert {key: gguf_file.metadata[key] for key in VALUES} == {
        key: value for key, (value, _) in VALUES.items()
    }
    assert {key: gguf_file.array(key) for key in ARRAYS} == ARRAYS
    assert gguf_file.array("no.such.key") == []
    with pytest.raises(WeightsError, match="text must be an array, is 'caf"):
        gguf_file.array("text")


def test_tensor_shapes_types_and_offsets_are_read(file: Path) -> None:
    tensors = GGUFFile(file).tensors
    assert {
        name: (tensor.shape, tensor.block_type.name, tensor.num_bytes) for name, tensor in tensors.items()
    } == {
        "a.weight": ((3, 4), "F32", 48),
        "b.weight": ((1, 2, 3), "F16", 12),
        "rope_freqs.weight": ((3,), "F32", 12),
    }
    data = file.read_bytes()
    numbers = np.frombuffer(data, np.float32, 12, tensors["a.weight"].offset)
    assert numbers.tolist() == list(range(12))
    assert GGUFFile(file).floats("rope_freqs.weight") == [1.0, 0.1, 8.0]
    assert GGUFFile(file).floats("no.such") is None
    with pytest.raises(
        WeightsError, match=r"b.weight must have at most 65536 elements of type F32, was .* F16"
    ):
        GGUFFile(file).floats("b.weight")


def test_block_types_equal_those_of_the_gguf_package() -> None:
    for number, block_type in BLOCK_TYPES.items():
        expected = GGMLQuantizationType(number)
        assert (block_type.name, (block_type.num_elements, block_type.num_bytes)) == (
            expected.name,
            gguf.GGML_QUANT_SIZES[expected],
        )


@pytest.mark.parametrize("alignment", [8, 64, 256])
def test_tensors_of_files_with_a_custom_alignment_are_read(tmp_path: Path, alignment: int) -> None:
    tensors = {name: np.full(3, number, np.float32) for number, name in enumerate("abc")}
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(alignment)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    write_and_close(writer)
    gguf_file = GGUFFile(tmp_path / "a.gguf")
    assert all(tensor.offset % alignment == 0 for tensor in gguf_file.tensors.values())
    assert [gguf_file.floats(name) for name in "abc"] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


def test_version_2_is_read_like_version_3(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4] = 2
    file.write_bytes(data)
    assert GGUFFile(file).array("texts") == ARRAYS["texts"]


def test_big_endian_files_are_refused(tmp_path: Path) -> None:
    file = write_gguf_file(tmp_path / "a.gguf", endianess=GGUFEndian.BIG)
    with pytest.raises(WeightsError, match="is a big-endian GGUF file"):
        GGUFFile(file)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "it has only 0 bytes"),
        (b"GGML" + bytes(40), "does not start with GGUF"),
        (make_gguf_bytes(version=1), "is of GGUF version 1: versions 2 and 3 can be read"),
        (make_gguf_bytes(version=99), "is of GGUF version 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), f"{2**63} tensors do not fit into a file of 24 bytes"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), f"{2**40} metadata keys do not fit into"),
        (
            make_gguf_bytes([encode_string("k") + struct.pack("<I", 77)]),
            "a value has type 77, which the format does not define",
        ),
        (make_gguf_bytes([encode_string("k") + struct.pack("<IB", 7, 2)]), "neither 0 nor 1"),
        (
            make_gguf_bytes([encode_string("k") + struct.pack("<IQ", _STRING, 2**50)]),
            f"{2**50} bytes expected",
        ),
        (
            make_gguf_bytes([encode_string("k") + struct.pack("<IIQ", _ARRAY, _U32, 2**60)]),
            f"an array of {2**60} values",
        ),
        (
            make_gguf_bytes(
                [encode_string("k") + struct.pack("<IIQ", _ARRAY, _STRING, 2)], data=b"\xff" * 64
            ),
            "after the end of the file",
        ),
        (
            make_gguf_bytes([encode_string("k") + struct.pack("<IIQ", _ARRAY, 13, 0)]),
            "an array holds values of type 13",
        ),
        (
            make_gguf_bytes(
                [encode_string("k") + struct.pack("<I", _ARRAY) + struct.pack("<IQ", _ARRAY, 1) * 9]
            ),
            "an array holds values of type 9",
        ),
        (make_gguf_bytes([struct.pack("<Q", 70000) + bytes(70000)]), "a name has 70000 bytes"),
        (
            make_gguf_bytes([struct.pack("<Q", 2) + b"\xff\xfe" + bytes(40)]),
            "a string of 2 bytes is not UTF-8",
        ),
        (make_gguf_bytes([encode_string("k") + struct.pack("<II", _U32, 1)] * 2), "k appears twice"),
        (make_gguf_bytes(tensors=[make_tensor_description("w", [2])] * 2, data=bytes(64)), "w appears twice"),
        (make_gguf_bytes(tensors=[make_tensor_description("w", [])]), "w has 0 dimensions"),
        (
            make_gguf_bytes(tensors=[make_tensor_description("w", [1] * 5)]),
            "w has 5 dimensions: it must have 1 to 4",
        ),
        (
            make_gguf_bytes(tensors=[make_tensor_description("w", [2, 0])]),
            r"w of type F32 cannot have the dimensions \[2, 0\]",
        ),
        (
            make_gguf_bytes(tensors=[make_tensor_description("w", [48, 4], 2)]),
            r"w of type Q4_0 cannot have the dimensions \[48, 4\]",
        ),
        (make_gguf_bytes(tensors=[make_tensor_description("w", [32], 4)]), "w has the unknown type 4"),
        (
            make_gguf_bytes(tensors=[make_tensor_description("w", [2], 0, 4)], data=bytes(64)),
            "the offset of w is 4, not a multiple of 32",
        ),
        (
            make_gguf_bytes(tensors=[make_tensor_description("w", [9])], data=bytes(32)),
            "is truncated: w ends at byte 100, the file at 96",
        ),
        (
            make_gguf_bytes(tensors=[make_tensor_description("w", [2**62, 2])], data=bytes(32)),
            "is truncated: w ends at byte",
        ),
        (
            make_gguf_bytes([encode_string("general.alignment") + struct.pack("<II", _U32, 12)]),
            "general.alignment must be a multiple of 8, is 12",
        ),
        (
            make_gguf_bytes([encode_string("general.alignment") + struct.pack("<II", _U32, 0)]),
            "must be a multiple of 8, is 0",
        ),
    ],
)
def test_a_file_that_cannot_be_read_raises_a_one_line_error(
    tmp_path: Path, data: bytes, problem: str
) -> None:
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(WeightsError, match=problem) as error:
        GGUFFile(tmp_path / "a.gguf").tensors  # noqa: B018
    assert "\n" not in str(error.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot be read: No such file"):
        GGUFFile(tmp_path / "a.gguf")


def test_a_file_truncated_at_any_byte_is_refused(file: Path) -> None:
    data = file.read_bytes()
    data_end = max(tensor.offset + tensor.num_bytes for tensor in GGUFFile(file).tensors.values())
    for size in range(data_end):
        file.write_bytes(data[:size])
        with pytest.raises(WeightsError):
            GGUFFile(file).tensors  # noqa: B018


@pytest.fixture(scope="module")
def valid_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    arrays = {key: (value, GGUFValueType.ARRAY) for key, value in ARRAYS.items()}
    folder = tmp_path_factory.mktemp("good")
    return write_gguf_file(
        folder / "a.gguf", {"a.weight": np.ones((2, 32), np.float32)}, VALUES | arrays
    ).read_bytes()


@given(data=st.data())
def test_random_byte_changes_cause_an_error_or_valid_offsets(
    valid_bytes: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged_bytes = bytearray(valid_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged_bytes[data.draw(st.integers(0, len(damaged_bytes) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "damaged.gguf"
    file.write_bytes(damaged_bytes)
    with suppress(WeightsError):
        gguf_file = GGUFFile(file)
        for tensor in gguf_file.tensors.values():
            assert tensor.offset + tensor.num_bytes <= len(damaged_bytes)
        for key, value in gguf_file.metadata.items():
            if not isinstance(value, int | float | str):
                gguf_file.array(key)


class TestParts:
    """A model that is split into several files."""

    def write_split_files(self, folder: Path) -> list[Path]:
        files = []
        for number in (1, 2, 3):
            metadata = {
                "split.count": (3, GGUFValueType.UINT16),
                "split.no": (number - 1, GGUFValueType.UINT16),
            }
            if number == 1:
                metadata["split.tensors.count"] = (3, GGUFValueType.INT32)
            tensors = {f"w{number}": np.full(2, number, np.float32)}
            files.append(write_gguf_file(folder / f"m-{number:05}-of-00003.gguf", tensors, metadata))
        return files

    def test_tensors_of_all_parts_are_read(self, tmp_path: Path) -> None:
        files = self.write_split_files(tmp_path)
        gguf_file = GGUFFile(files[0])
        assert {name: tensor.file for name, tensor in gguf_file.tensors.items()} == dict(
            zip(("w1", "w2", "w3"), files, strict=True)
        )
        assert gguf_file.floats("w3") == [3.0, 3.0]

    def test_the_error_for_a_missing_part_names_the_part(self, tmp_path: Path) -> None:
        files = self.write_split_files(tmp_path)
        files[1].unlink()
        with pytest.raises(WeightsError, match=r"1 of 3 parts are missing: m-00002-of-00003.gguf"):
            GGUFFile(files[0]).tensors  # noqa: B018

    def test_the_error_for_a_later_part_names_the_first_part(self, tmp_path: Path) -> None:
        files = self.write_split_files(tmp_path)
        with pytest.raises(WeightsError, match=r"use its first part, m-00001-of-00003.gguf"):
            GGUFFile(files[2]).tensors  # noqa: B018

    def test_a_tensor_in_two_parts_is_refused(self, tmp_path: Path) -> None:
        files = self.write_split_files(tmp_path)
        write_gguf_file(files[2], {"w1": np.ones(2, np.float32)})
        with pytest.raises(WeightsError, match=r"contains w1, which is also in m-00001-of-00003.gguf"):
            GGUFFile(files[0]).tensors  # noqa: B018

    def test_a_renamed_part_is_refused(self, tmp_path: Path) -> None:
        files = self.write_split_files(tmp_path)
        with pytest.raises(WeightsError, match=r"split.tensors.count is 3, but the files have 1"):
            GGUFFile(files[0].rename(tmp_path / "m.gguf")).tensors  # noqa: B018
