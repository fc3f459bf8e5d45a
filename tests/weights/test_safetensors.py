"""Headers of valid and damaged safetensors files, and of checkpoints of one or several files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from penstock.dtype import DType
from penstock.errors import WeightsError
from penstock.weights.safetensors import read_checkpoint_headers, read_header, read_metadata


def write_file(file: Path, header: Any, data: bytes = b"") -> Path:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def make_entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write_shards(folder: Path, weight_map: dict[str, str]) -> None:
    for name in sorted(set(weight_map.values())):
        tensors = {tensor: np.ones(2, np.float32) for tensor, file in weight_map.items() if file == name}
        save_file(tensors, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_headers_have_types_shapes_and_sizes(tmp_path: Path) -> None:
    save_file(
        {"a": np.zeros((2, 3), np.float32), "b": np.zeros((), np.int8), "c": np.zeros((0, 4), np.float16)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    headers = read_checkpoint_headers(tmp_path)
    actual = {
        name: (header.dtype, header.shape, header.num_elements, header.num_bytes)
        for name, header in headers.items()
    }
    assert actual == {
        "a": (DType.float32, (2, 3), 6, 24),
        "b": (DType.int8, (), 1, 1),
        "c": (DType.float16, (0, 4), 0, 0),
    }
    assert [headers[name].is_float for name in "abc"] == [True, False, True]


def test_an_unknown_type_has_no_dtype(tmp_path: Path) -> None:
    header = read_header(write_file(tmp_path / "a", {"w": make_entry("F8_E4M3", [3], 0, 3)}, b"123"))["w"]
    assert (header.dtype, header.type_name, header.is_float) == (None, "F8_E4M3", False)


def test_a_single_file_may_have_any_name(tmp_path: Path) -> None:
    save_file({"a": np.zeros(2)}, tmp_path / "weights.safetensors")
    assert list(read_checkpoint_headers(tmp_path)) == ["a"]
    assert list(read_checkpoint_headers(tmp_path / "weights.safetensors")) == ["a"]


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"})
    files = {name: header.file.name for name, header in read_checkpoint_headers(tmp_path).items()}
    assert files == {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}


def test_the_error_for_missing_shards_names_them(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"1 of 2 shards are missing: 2\.safetensors"):
        read_checkpoint_headers(tmp_path)


def test_an_index_with_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": "1.safetensors"})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "z": "1.safetensors"}}))
    with pytest.raises(WeightsError, match=r"lists z in 1\.safetensors, but the tensor is not in that file"):
        read_checkpoint_headers(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": []}, "has no weight_map"),
        ([], "must contain a JSON object"),
        ({"weight_map": {"a": "../1.safetensors"}}, "not a file in the same folder"),
        ({"weight_map": {"a": 3}}, "1 of 1 shards are missing: 3"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, index: Any, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=message):
        read_checkpoint_headers(tmp_path)


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        save_file({name: np.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(WeightsError, match=r"has 2 safetensors files but no model\.safetensors\.index\.json"):
        read_checkpoint_headers(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="has no safetensors file"):
        read_checkpoint_headers(tmp_path)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "its header is damaged"),
        (b"\xff", b"", "its header is damaged"),
        (b"[]", b"", "its header is damaged"),
        ({"w": 3}, b"", "its header is damaged"),
        ({"w": {"dtype": "F32", "shape": [1]}}, b"1234", "its header is damaged"),
        ({"w": make_entry("F32", [2], 0, 4)}, b"1234", "its header is damaged"),
        ({"w": make_entry("F32", [-1], 0, 4)}, b"1234", "its header is damaged"),
        ({"w": make_entry("F32", [1], 4, 0)}, b"1234", "its header is damaged"),
        (
            {"w": make_entry("F32", [2], 0, 8)},
            b"1234",
            "is truncated: 8 bytes of tensors expected, 4 present",
        ),
        ({"w": make_entry("F32", [1], 0, 4)}, b"12345", "there are gaps between its tensors"),
        (
            {"v": make_entry("F32", [1], 0, 4), "w": make_entry("F32", [1], 2, 6)},
            b"123456",
            "there are gaps between its tensors",
        ),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        read_header(write_file(tmp_path / "model.safetensors", header, data))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has only 0 bytes"),
        (b"1234567", "it has only 7 bytes"),
        (b"version https://git-lfs.github.com/spec/v1", "its first 8 bytes are not a header length"),
        (struct.pack("<Q", 50) + b"{}", "truncated in its header: 58 bytes expected, 10 present"),
    ],
)
def test_a_file_without_a_complete_header_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(WeightsError, match=message):
        read_header(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"x\.safetensors: cannot be read: No such file"):
        read_header(tmp_path / "x.safetensors")


@given(num_bytes=st.integers(0, 300))
def test_a_file_truncated_anywhere_is_refused(
    tmp_path_factory: pytest.TempPathFactory, num_bytes: int
) -> None:
    file = tmp_path_factory.mktemp("cut") / "model.safetensors"
    save_file({"a": np.zeros((5, 7), np.float32), "b": np.zeros(9, np.int64)}, file)
    content = file.read_bytes()
    file.write_bytes(content[: min(num_bytes, len(content) - 1)])
    with pytest.raises(WeightsError):
        read_header(file)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"__metadata__": {"a": "b", "c": 1}}', {"a": "b"}),
        (b'{"__metadata__": null}', {}),
        (b"{}", {}),
        (b"[1]", {}),
    ],
)
def test_read_metadata_returns_only_strings(tmp_path: Path, content: bytes, expected: dict[str, str]) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(struct.pack("<Q", len(content)) + content)
    assert read_metadata(file) == expected


@pytest.mark.parametrize(
    "content",
    [struct.pack("<Q", 2**64 - 1) + b"{}x", b"abc", struct.pack("<Q", 21) + b'{"__metadata__": [1]}'],
)
def test_metadata_of_a_damaged_file_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(content)
    with pytest.raises(WeightsError, match="cannot be read"):
        read_metadata(file)
