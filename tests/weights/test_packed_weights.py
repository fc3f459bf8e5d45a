"""Files of packed weights equal the packed weights of a load, and are not used if they may be outdated."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import DECODERS, write_checkpoint
from support.running import context_of, open_pipeline, step_logits

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
def packings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the encodings of the layers that the back end packs."""
    found: list[str] = []
    pack = CpuOps._pack

    def watched(
        ops: CpuOps, parts: Sequence[torch.Tensor], encoding: str, *options: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        found.append(encoding)
        return pack(ops, parts, encoding, *options)

    monkeypatch.setattr(CpuOps, "_pack", watched)
    return found


def config_of(checkpoint: Path, encoding: str = "int8") -> PipelineConfig:
    return PipelineConfig.from_flat({"model_path": str(checkpoint), "quantization_encoding": encoding})


def logits(checkpoint: Path, encoding: str = "int8") -> torch.Tensor:
    pipeline = open_pipeline(checkpoint, quantization_encoding=encoding)
    return step_logits(pipeline, [context_of(PROMPT)])[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of("llama", tmp_path_factory.mktemp("llama"))


def checkpoint_of(name: str, folder: Path) -> Path:
    (architecture,) = (one for one in DECODERS if one.name == name)
    assert architecture.tiny_config is not None
    return write_checkpoint(folder, architecture.tiny_config())


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "qwen3_moe", "gpt_oss"])
def test_packed_files_equal_what_a_load_packs(
    name: str, encoding: str, tmp_path: Path, packings: list[str]
) -> None:
    checkpoint = checkpoint_of(name, tmp_path / name)
    expected = logits(checkpoint, encoding)
    assert len(packings) > 4 or encoding in ("float32", "bfloat16"), "which wait for a second step"
    pack_checkpoint(config_of(checkpoint, encoding))
    packings.clear()
    assert torch.equal(logits(checkpoint, encoding), expected)
    assert not packings, "nothing is packed any more"


def test_a_file_is_for_one_encoding(tiny: Path, packings: list[str]) -> None:
    pack_checkpoint(config_of(tiny, "float32"))
    packings.clear()
    logits(tiny)
    assert set(packings) == {"int8"}


def test_another_checkpoint_in_its_place(tmp_path: Path, packings: list[str]) -> None:
    checkpoint = checkpoint_of("llama", tmp_path / "llama")
    file = pack_checkpoint(config_of(checkpoint))
    weights = checkpoint / "model.safetensors"
    save_file({name: one * 0.5 for name, one in load_file(weights).items()}, weights)
    packings.clear()
    halved = logits(checkpoint)
    assert packings, "the file is of the weights that were there before"
    assert pack_checkpoint(config_of(checkpoint)) == file, "it is replaced"
    packings.clear()
    assert torch.equal(logits(checkpoint), halved)
    assert not packings


@pytest.mark.parametrize("version", ["__version__", "LAYOUTS_VERSION"])
def test_another_version(
    version: str, tiny: Path, packings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_checkpoint(config_of(tiny))
    monkeypatch.setattr(packed_weights, version, "another")
    packings.clear()
    logits(tiny)
    assert packings


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: os.truncate(file, file.stat().st_size - 1),
        lambda file: os.truncate(file, 20),
        lambda file: os.truncate(file, 0),
        lambda file: file.write_bytes(b"x" * 1000),
    ],
)
def test_a_damaged_file(
    spoil: Callable[[Path], object], tiny: Path, packings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(tiny)
    spoil(pack_checkpoint(config_of(tiny)))
    packings.clear()
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits(tiny), expected)
    assert packings
    assert "packed weights are not used" in caplog.text


def test_a_file_of_something_else(tiny: Path, packings: list[str]) -> None:
    file = pack_checkpoint(config_of(tiny))
    save_file({"a": torch.ones(3, dtype=torch.float64)}, file)
    packings.clear()
    logits(tiny)
    assert packings


def test_layers_in_another_order_are_packed_anew(
    tiny: Path, packings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(tiny)
    write = packed_weights.write_packed

    def exchanged(key: PackedKey, layers: list[PackedLinear]) -> Path:
        layers[1], layers[2] = layers[2], layers[1]
        return write(key, layers)

    monkeypatch.setattr(packed_weights, "write_packed", exchanged)
    pack_checkpoint(config_of(tiny))
    packings.clear()
    assert torch.equal(logits(tiny), expected)
    assert len(packings) == 2


def test_a_failed_write_keeps_the_old_file(
    tiny: Path, packings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = pack_checkpoint(config_of(tiny))

    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(packed_weights, "read_in_huge_pages", fail)
        with pytest.raises(OSError, match="No space"):
            pack_checkpoint(config_of(tiny))
    assert list(file.parent.iterdir()) == [file]
    packings.clear()
    logits(tiny)
    assert not packings


def test_the_place_of_the_file(tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_of(tiny).model.packed_key.file.parent == cache / "penstock" / "packed"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(cache / "home"))
    assert config_of(tiny).model.packed_key.file.parent == cache / "home" / ".cache" / "penstock" / "packed"


def test_back_ends_that_pack_in_rows_are_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InferenceSession, "ops", ReferenceOps())
    with pytest.raises(ConfigError, match="the reference kernels do not pack weights"):
        pack_checkpoint(config_of(tiny))


def test_the_reference_kernels_do_not_use_it(tiny: Path, packings: list[str]) -> None:
    def logits() -> torch.Tensor:
        pipeline = open_pipeline(tiny, kernels="reference", quantization_encoding="int8")
        return step_logits(pipeline, [context_of(PROMPT)])[0]

    expected = logits()
    pack_checkpoint(config_of(tiny))
    packings.clear()
    assert torch.equal(logits(), expected)
    assert not packings
