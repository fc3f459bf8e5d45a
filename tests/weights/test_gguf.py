"""Headers of GGUF files, valid and damaged."""

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
from support.gguf_files import finish

from penstock.errors import WeightsError
from penstock.weights.gguf import BLOCK_TYPES, GGUFFile

_STRING, _ARRAY, _U32 = 8, 9, 4


def write(
    file: Path,
    tensors: Mapping[str, np.ndarray] | None = None,
    metadata: Mapping[str, tuple[Any, GGUFValueType]] | None = None,
    **options: Any,
) -> Path:
    writer = GGUFWriter(file, "llama", **options)
    for key, (value, kind) in (metadata or {}).items():
        writer.add_key_value(key, value, kind)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return file


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def raw(
    entries: list[bytes] = (), tensors: list[bytes] = (), *, version: int = 3, data: bytes = b""
) -> bytes:  # type: ignore[assignment]
    """Return the bytes of a GGUF file with these parts, aligned to 32 bytes."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries))
    header += b"".join([*entries, *tensors])
    return header + bytes(-len(header) % 32) + data


def described(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


VALUES = {
    "u8": (200, GGUFValueType.UINT8),
    "i8": (-5, GGUFValueType.INT8),
    "u16": (60000, GGUFValueType.UINT16),
    "i16": (-300, GGUFValueType.INT16),
    "u32": (2**32 - 1, GGUFValueType.UINT32),
    "i32": (-7, GGUFValueType.INT32),
    "f32": (1e-5, GGUFValueType.FLOAT32),
    "yes": (True, GGUFValueType.BOOL),
    "no": (False, GGUFValueType.BOOL),
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
    "deep": [[1, 2], [3]],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    arrays = {key: (value, GGUFValueType.ARRAY) for key, value in ARRAYS.items()}
    tensors = {
        "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b.weight": np.arange(6, dtype=np.float16).reshape(1, 2, 3),
        "rope_freqs.weight": np.array([1.0, 0.1, 8.0], dtype=np.float32),
    }
    return write(tmp_path / "a.gguf", tensors, VALUES | arrays)


def test_values_of_every_kind(file: Path) -> None:
    read = GGUFFile(file)
    assert {key: read.metadata[key] for key in VALUES} == {key: value for key, (value, _) in VALUES.items()}
    assert {key: read.array(key) for key in ARRAYS} == ARRAYS
    assert read.array("no.such.key") == []
    with pytest.raises(WeightsError, match="text must be an array, is 'caf"):
        read.array("text")


def test_tensor_offsets(file: Path) -> None:
    tensors = GGUFFile(file).tensors
    assert {name: (t.shape, t.block_type.name, t.num_bytes) for name, t in tensors.items()} == {
        "a.weight": ((3, 4), "F32", 48),
        "b.weight": ((1, 2, 3), "F16", 12),
        "rope_freqs.weight": ((3,), "F32", 12),
    }
    data = file.read_bytes()
    found = np.frombuffer(data, np.float32, 12, tensors["a.weight"].offset)
    assert found.tolist() == list(range(12))
    assert GGUFFile(file).floats("rope_freqs.weight") == [1.0, 0.1, 8.0]
    assert GGUFFile(file).floats("no.such") is None
    with pytest.raises(WeightsError, match=r"b.weight must be at most 65536 numbers of type F32, is .* F16"):
        GGUFFile(file).floats("b.weight")


def test_the_table_of_types_is_the_formats() -> None:
    for number, kind in BLOCK_TYPES.items():
        known = GGMLQuantizationType(number)
        assert (kind.name, (kind.num_elements, kind.num_bytes)) == (known.name, gguf.GGML_QUANT_SIZES[known])


@pytest.mark.parametrize("alignment", [8, 64, 256])
def test_other_alignments(tmp_path: Path, alignment: int) -> None:
    tensors = {name: np.full(3, number, np.float32) for number, name in enumerate("abc")}
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(alignment)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    finish(writer)
    read = GGUFFile(tmp_path / "a.gguf")
    assert all(tensor.offset % alignment == 0 for tensor in read.tensors.values())
    assert [read.floats(name) for name in "abc"] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


def test_version_2_reads_as_version_3(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4] = 2
    file.write_bytes(data)
    assert GGUFFile(file).array("texts") == ARRAYS["texts"]


def test_big_endian_files_are_refused_by_name(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", endianess=GGUFEndian.BIG)
    with pytest.raises(WeightsError, match="is a big-endian GGUF file"):
        GGUFFile(file)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "it has only 0 bytes"),
        (b"GGML" + bytes(40), "does not start with GGUF"),
        (raw(version=1), "is of GGUF version 1: versions 2 and 3 can be read"),
        (raw(version=99), "is of GGUF version 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), f"{2**63} tensors announced in a file of 24 bytes"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), f"{2**40} metadata keys announced"),
        (raw([text("k") + struct.pack("<I", 77)]), "a value has type 77, which the format does not define"),
        (raw([text("k") + struct.pack("<IB", 7, 2)]), "neither 0 nor 1"),
        (raw([text("k") + struct.pack("<IQ", _STRING, 2**50)]), f"{2**50} bytes expected"),
        (raw([text("k") + struct.pack("<IIQ", _ARRAY, _U32, 2**60)]), f"an array of {2**60} values"),
        (
            raw([text("k") + struct.pack("<IIQ", _ARRAY, _STRING, 2)], data=b"\xff" * 64),
            "after the end of the file",
        ),
        (raw([text("k") + struct.pack("<IIQ", _ARRAY, 13, 0)]), "an array holds values of type 13"),
        (
            raw([text("k") + struct.pack("<I", _ARRAY) + struct.pack("<IQ", _ARRAY, 1) * 9]),
            "an array holds values of type 9",
        ),
        (raw([struct.pack("<Q", 70000) + bytes(70000)]), "a name of 70000 bytes"),
        (raw([struct.pack("<Q", 2) + b"\xff\xfe" + bytes(40)]), "a string of 2 bytes is not UTF-8"),
        (raw([text("k") + struct.pack("<II", _U32, 1)] * 2), "k appears twice"),
        (raw(tensors=[described("w", [2])] * 2, data=bytes(64)), "w appears twice"),
        (raw(tensors=[described("w", [])]), "w has 0 dimensions"),
        (raw(tensors=[described("w", [1] * 5)]), "w has 5 dimensions: it must have 1 to 4"),
        (raw(tensors=[described("w", [2, 0])]), r"w of type F32 cannot have the dimensions \[2, 0\]"),
        (raw(tensors=[described("w", [48, 4], 2)]), r"w of type Q4_0 cannot have the dimensions \[48, 4\]"),
        (raw(tensors=[described("w", [32], 4)]), "w has the unknown type 4"),
        (
            raw(tensors=[described("w", [2], 0, 4)], data=bytes(64)),
            "the offset of w is 4, not a multiple of 32",
        ),
        (
            raw(tensors=[described("w", [9])], data=bytes(32)),
            "is truncated: w ends at byte 100, the file at 96",
        ),
        (raw(tensors=[described("w", [2**62, 2])], data=bytes(32)), "is truncated: w ends at byte"),
        (
            raw([text("general.alignment") + struct.pack("<II", _U32, 12)]),
            "general.alignment must be a multiple of 8, is 12",
        ),
        (raw([text("general.alignment") + struct.pack("<II", _U32, 0)]), "must be a multiple of 8, is 0"),
    ],
)
def test_a_damaged_file_raises_an_error_with_numbers(tmp_path: Path, data: bytes, problem: str) -> None:
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(WeightsError, match=problem) as error:
        GGUFFile(tmp_path / "a.gguf").tensors  # noqa: B018
    assert "\n" not in str(error.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot be read: No such file"):
        GGUFFile(tmp_path / "a.gguf")


def test_cut_at_every_byte(file: Path) -> None:
    data = file.read_bytes()
    last = max(tensor.offset + tensor.num_bytes for tensor in GGUFFile(file).tensors.values())
    for size in range(last):
        file.write_bytes(data[:size])
        with pytest.raises(WeightsError):
            GGUFFile(file).tensors  # noqa: B018


@pytest.fixture(scope="module")
def good_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    arrays = {key: (value, GGUFValueType.ARRAY) for key, value in ARRAYS.items()}
    folder = tmp_path_factory.mktemp("good")
    return write(folder / "a.gguf", {"a.weight": np.ones((2, 32), np.float32)}, VALUES | arrays).read_bytes()


@given(data=st.data())
def test_flipped_bytes_end_in_an_error_or_in_other_values(
    good_bytes: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(good_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "damaged.gguf"
    file.write_bytes(damaged)
    with suppress(WeightsError):
        read = GGUFFile(file)
        for tensor in read.tensors.values():
            assert tensor.offset + tensor.num_bytes <= len(damaged)
        for key, value in read.metadata.items():
            if not isinstance(value, int | float | str):
                read.array(key)


class TestParts:
    """A model split over several files."""

    def parts(self, folder: Path) -> list[Path]:
        files = []
        for number in (1, 2, 3):
            split = {"split.count": (3, GGUFValueType.UINT16), "split.no": (number - 1, GGUFValueType.UINT16)}
            if number == 1:
                split["split.tensors.count"] = (3, GGUFValueType.INT32)
            tensors = {f"w{number}": np.full(2, number, np.float32)}
            files.append(write(folder / f"m-{number:05}-of-00003.gguf", tensors, split))
        return files

    def test_they_are_one(self, tmp_path: Path) -> None:
        files = self.parts(tmp_path)
        read = GGUFFile(files[0])
        assert {name: tensor.file for name, tensor in read.tensors.items()} == dict(
            zip(("w1", "w2", "w3"), files, strict=True)
        )
        assert read.floats("w3") == [3.0, 3.0]

    def test_a_missing_part_is_named(self, tmp_path: Path) -> None:
        files = self.parts(tmp_path)
        files[1].unlink()
        with pytest.raises(WeightsError, match=r"1 of 3 parts are missing: m-00002-of-00003.gguf"):
            GGUFFile(files[0]).tensors  # noqa: B018

    def test_a_later_part_points_to_the_first(self, tmp_path: Path) -> None:
        files = self.parts(tmp_path)
        with pytest.raises(WeightsError, match=r"give its first, m-00001-of-00003.gguf"):
            GGUFFile(files[2]).tensors  # noqa: B018

    def test_a_tensor_in_two_parts(self, tmp_path: Path) -> None:
        files = self.parts(tmp_path)
        write(files[2], {"w1": np.ones(2, np.float32)})
        with pytest.raises(WeightsError, match=r"holds w1, which m-00001-of-00003.gguf also holds"):
            GGUFFile(files[0]).tensors  # noqa: B018

    def test_a_part_under_another_name(self, tmp_path: Path) -> None:
        files = self.parts(tmp_path)
        with pytest.raises(WeightsError, match="announces 3 tensors, its parts hold 1"):
            GGUFFile(files[0].rename(tmp_path / "m.gguf")).tensors  # noqa: B018
