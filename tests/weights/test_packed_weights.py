"""Files of packed weights: equal to newly packed weights, and not used if outdated or damaged."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import make_tiny_config, write_checkpoint
from support.pipeline_steps import make_context, open_pipeline, step_logits

from penstock.assembly import pack_checkpoint
from penstock.engine import InferenceSession
from penstock.errors import ConfigError
from penstock.kernels import PackedLinear
from penstock.kernels.cpu import available_isas
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.reference import ReferenceOps
from penstock.pipelines import PipelineConfig
from penstock.weights import packed_weights
from penstock.weights.packed_file import PackedKey

pytestmark = pytest.mark.skipif(not available_isas(), reason="the C++ kernels are not built")

PROMPT = [1, 5, 9, 3, 7, 2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def packed_encodings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the encoding of each packed layer is appended."""
    encodings: list[str] = []
    original_pack = CpuOps._pack

    def record_encoding(
        ops: CpuOps, parts: Sequence[torch.Tensor], encoding: str, *options: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        encodings.append(encoding)
        return original_pack(ops, parts, encoding, *options)

    monkeypatch.setattr(CpuOps, "_pack", record_encoding)
    return encodings


def make_config(checkpoint: Path, encoding: str = "int8") -> PipelineConfig:
    return PipelineConfig.from_flat({"model_path": str(checkpoint), "quantization_encoding": encoding})


def compute_logits(checkpoint: Path, encoding: str = "int8") -> torch.Tensor:
    pipeline = open_pipeline(checkpoint, quantization_encoding=encoding)
    return step_logits(pipeline, [make_context(PROMPT)])[0]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_architecture_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def write_architecture_checkpoint(name: str, folder: Path) -> Path:
    return write_checkpoint(folder, make_tiny_config(name))


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "qwen3_moe", "gpt_oss"])
def test_logits_with_and_without_a_packed_file_are_equal(
    name: str, encoding: str, tmp_path: Path, packed_encodings: list[str]
) -> None:
    checkpoint = write_architecture_checkpoint(name, tmp_path / name)
    expected = compute_logits(checkpoint, encoding)
    assert len(packed_encodings) > 4 or encoding in ("float32", "bfloat16"), (
        "layers must be packed, except float weights, which are packed later"
    )
    pack_checkpoint(make_config(checkpoint, encoding))
    packed_encodings.clear()
    assert torch.equal(compute_logits(checkpoint, encoding), expected)
    assert not packed_encodings, "no layer may be packed again"


def test_a_file_of_another_encoding_is_not_used(llama: Path, packed_encodings: list[str]) -> None:
    pack_checkpoint(make_config(llama, "float32"))
    packed_encodings.clear()
    compute_logits(llama)
    assert set(packed_encodings) == {"int8"}


def test_a_file_of_replaced_weights_is_not_used(tmp_path: Path, packed_encodings: list[str]) -> None:
    checkpoint = write_architecture_checkpoint("llama", tmp_path / "llama")
    file = pack_checkpoint(make_config(checkpoint))
    weights = checkpoint / "model.safetensors"
    save_file({name: tensor * 0.5 for name, tensor in load_file(weights).items()}, weights)
    packed_encodings.clear()
    expected = compute_logits(checkpoint)
    assert packed_encodings, "the file of the previous weights must not be used"
    assert pack_checkpoint(make_config(checkpoint)) == file, "the new file must replace the previous one"
    packed_encodings.clear()
    assert torch.equal(compute_logits(checkpoint), expected)
    assert not packed_encodings


@pytest.mark.parametrize("version", ["__version__", "LAYOUTS_VERSION"])
def test_a_file_of_another_version_is_not_used(
    version: str, llama: Path, packed_encodings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_checkpoint(make_config(llama))
    monkeypatch.setattr(packed_weights, version, "another")
    packed_encodings.clear()
    compute_logits(llama)
    assert packed_encodings


@pytest.mark.parametrize(
    "damage_file",
    [
        lambda file: os.truncate(file, file.stat().st_size - 1),
        lambda file: os.truncate(file, 20),
        lambda file: os.truncate(file, 0),
        lambda file: file.write_bytes(b"x" * 1000),
    ],
)
def test_a_damaged_file_is_not_used(
    damage_file: Callable[[Path], object],
    llama: Path,
    packed_encodings: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = compute_logits(llama)
    damage_file(pack_checkpoint(make_config(llama)))
    packed_encodings.clear()
    with caplog.at_level(logging.WARNING):
        assert torch.equal(compute_logits(llama), expected)
    assert packed_encodings
    assert "packed weights are not used" in caplog.text


def test_a_file_with_other_tensors_is_not_used(llama: Path, packed_encodings: list[str]) -> None:
    file = pack_checkpoint(make_config(llama))
    save_file({"a": torch.ones(3, dtype=torch.float64)}, file)
    packed_encodings.clear()
    compute_logits(llama)
    assert packed_encodings


def test_layers_in_another_order_are_packed_again(
    llama: Path, packed_encodings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = compute_logits(llama)
    original_write = packed_weights.write_packed

    def write_in_another_order(key: PackedKey, layers: list[PackedLinear]) -> Path:
        layers[1], layers[2] = layers[2], layers[1]
        return original_write(key, layers)

    monkeypatch.setattr(packed_weights, "write_packed", write_in_another_order)
    pack_checkpoint(make_config(llama))
    packed_encodings.clear()
    assert torch.equal(compute_logits(llama), expected)
    assert len(packed_encodings) == 2


def test_a_failed_write_keeps_the_old_file(
    llama: Path, packed_encodings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = pack_checkpoint(make_config(llama))

    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(packed_weights, "read_in_huge_pages", fail)
        with pytest.raises(OSError, match="No space"):
            pack_checkpoint(make_config(llama))
    assert list(file.parent.iterdir()) == [file]
    packed_encodings.clear()
    compute_logits(llama)
    assert not packed_encodings


def test_the_file_is_in_the_cache_folder(llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_config(llama).model.packed_key.file.parent == cache / "penstock" / "packed"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(cache / "home"))
    assert (
        make_config(llama).model.packed_key.file.parent == cache / "home" / ".cache" / "penstock" / "packed"
    )


def test_packing_with_the_reference_kernels_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InferenceSession, "ops", ReferenceOps())
    with pytest.raises(ConfigError, match="the reference kernels do not pack weights"):
        pack_checkpoint(make_config(llama))


def test_the_reference_kernels_do_not_use_the_file(llama: Path, packed_encodings: list[str]) -> None:
    def compute_reference_logits() -> torch.Tensor:
        pipeline = open_pipeline(llama, kernels="reference", quantization_encoding="int8")
        return step_logits(pipeline, [make_context(PROMPT)])[0]

    expected = compute_reference_logits()
    pack_checkpoint(make_config(llama))
    packed_encodings.clear()
    assert torch.equal(compute_reference_logits(), expected)
    assert not packed_encodings
