"""Calibration: activation statistics of linear layers, and their use when a model is loaded."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import DECODERS, make_tiny_config, write_checkpoint
from support.pipeline_steps import open_pipeline
from torch import Tensor

from penstock import calibration
from penstock.architectures import network_model
from penstock.assembly import pack_checkpoint
from penstock.calibration import NUM_TOKENS, activation_statistics
from penstock.errors import WeightsError
from penstock.host.progress import LoadingProgress
from penstock.kernels import ENCODINGS, LazyWeight, PackedLinear, unpack_linear
from penstock.kernels.cpu import available_isas, library
from penstock.pipelines import PipelineConfig

needs_kernels = pytest.mark.skipif(not available_isas(), reason="the C++ kernels are not built")
INT4 = {"quantization_encoding": "int4"}
ARCHITECTURE_NAMES = [decoder.name for decoder in DECODERS if decoder.tiny_config is not None]


def write_architecture_checkpoint(name: str, folder: Path, **sizes: int) -> Path:
    return write_checkpoint(folder, make_tiny_config(name) | sizes)


@pytest.fixture
def checkpoint_folder(tmp_path: Path) -> Path:
    """Write a Llama checkpoint whose layers are large enough for 4-bit encodings."""
    return write_architecture_checkpoint(
        "llama", tmp_path / "llama", hidden_size=192, intermediate_size=256, head_dim=32
    )


@pytest.fixture
def recorded_inputs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor | None]]:
    """Return a list that receives the input ``[T, in]`` and statistics ``[in]`` of each calibrated layer."""
    inputs: list[tuple[Tensor, Tensor | None]] = []

    def record_statistics(x: Tensor) -> Tensor | None:
        inputs.append((x.clone(), activation_statistics(x)))
        return inputs[-1][1]

    monkeypatch.setattr(calibration, "activation_statistics", record_statistics)
    return inputs


def load_blocks(checkpoint: Path) -> Any:
    model: Any = open_pipeline(checkpoint, **INT4).model
    return model.network.blocks


@needs_kernels
@pytest.mark.parametrize("name", ARCHITECTURE_NAMES)
def test_layers_of_every_decoder_are_calibrated_with_equal_inputs_at_each_load(
    name: str, tmp_path: Path, recorded_inputs: list[tuple[Tensor, Tensor | None]]
) -> None:
    open_pipeline(write_architecture_checkpoint(name, tmp_path / name, **make_large_sizes(name)), **INT4)
    first_inputs = recorded_inputs[:]
    assert len(first_inputs) >= 2
    for x, importance in first_inputs:
        assert len(x) == NUM_TOKENS
        assert importance is not None
        assert importance.isfinite().all()
        assert float(importance.min()) > 0
        torch.testing.assert_close(importance.mean(), torch.tensor(1.0), rtol=1e-3, atol=0)
    open_pipeline(tmp_path / name, **INT4)
    assert all(
        torch.equal(x, y)
        for (x, _), (y, _) in zip(first_inputs, recorded_inputs[len(first_inputs) :], strict=True)
    )


def make_large_sizes(name: str) -> dict[str, int]:
    """Return layer sizes that are large enough for 4-bit encodings."""
    if name == "gpt2":
        return {"n_embd": 192, "n_inner": 256}
    return {"hidden_size": 192, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 6}


def test_statistics_are_mean_squares_divided_by_their_mean() -> None:
    x = torch.tensor([[1.0, 0.0, -2.0], [3.0, 0.0, 0.0]]).bfloat16()
    torch.testing.assert_close(activation_statistics(x), torch.tensor([5.0, 0.0, 2.0]) / (7 / 3) + 1e-6)
    assert activation_statistics(torch.zeros(2, 3)) is None
    assert activation_statistics(torch.tensor([[1.0, torch.nan]])) is None


@pytest.mark.parametrize("has_kernels", [pytest.param(True, marks=needs_kernels), False])
def test_packed_scales_depend_on_the_statistics(
    checkpoint_folder: Path,
    has_kernels: bool,
    recorded_inputs: list[tuple[Tensor, Tensor | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_kernels:
        monkeypatch.setattr(library, "ABI", -1)
    file = checkpoint_folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[::7] = 20.0
    save_file(tensors, file)
    packed_weight: PackedLinear = load_blocks(checkpoint_folder)[0].attention.qkv.packed
    assert packed_weight.layout.name == ("panels" if has_kernels else "rows")
    x, importance = recorded_inputs[0]
    tokens = torch.from_numpy(
        np.random.default_rng(0).integers(0, len(tensors["model.embed_tokens.weight"]), NUM_TOKENS)
    )
    embedding_rows = tensors["model.embed_tokens.weight"].bfloat16().float()[tokens]
    normalized_rows = embedding_rows * (embedding_rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    expected_inputs = normalized_rows * tensors["model.layers.0.input_layernorm.weight"]
    torch.testing.assert_close(x.float(), expected_inputs, rtol=0.02, atol=0.02)
    weight = torch.cat([tensors[f"{weight_slice.name}.weight"] for weight_slice in packed_weight.slices])
    encoding = ENCODINGS[packed_weight.encoding]
    fitted_weight = encoding.unpack(encoding.pack(weight, importance))
    assert torch.equal(unpack_linear(packed_weight), fitted_weight)
    assert not torch.equal(fitted_weight, encoding.unpack(encoding.pack(weight)))


def test_packed_weights_file_equals_weights_packed_at_load(
    checkpoint_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = PipelineConfig.from_flat({"model_path": str(checkpoint_folder), **INT4})
    loaded_blocks = load_blocks(checkpoint_folder)
    pack_checkpoint(config)
    assert config.model.packed_key.file.is_file()
    mapped_blocks = load_blocks(checkpoint_folder)
    for loaded_block, mapped_block in zip(loaded_blocks, mapped_blocks, strict=True):
        assert torch.equal(
            unpack_linear(loaded_block.mlp.down.packed), unpack_linear(mapped_block.mlp.down.packed)
        )


@needs_kernels
def test_progress_counts_every_calibrated_byte_once(
    checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_counts_by_title: dict[str, list[int]] = {}

    class RecordingProgress(LoadingProgress):
        def __init__(self, num_bytes: int, *, title: str = "loading") -> None:
            super().__init__(num_bytes, title=title)
            self.byte_counts = byte_counts_by_title.setdefault(title, [num_bytes])

        def advance(self, num_bytes: int) -> None:
            self.byte_counts.append(num_bytes)

    monkeypatch.setattr(network_model, "LoadingProgress", RecordingProgress)
    load_blocks(checkpoint_folder)
    tensors = load_file(checkpoint_folder / "model.safetensors")
    calibrated_projections = ("q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    num_calibrated_bytes = sum(
        tensor.nbytes
        for name, tensor in tensors.items()
        if any(projection in name for projection in calibrated_projections)
    )
    assert (
        byte_counts_by_title["quantizing"][0]
        == sum(byte_counts_by_title["quantizing"][1:])
        == num_calibrated_bytes
    )
    assert set(byte_counts_by_title) == {"loading", "quantizing"}


def test_calibration_leaves_no_pending_weights_and_no_reserved_memory(checkpoint_folder: Path) -> None:
    def count_pending_weights() -> int:
        return sum(type(gc_object) is LazyWeight and bool(gc_object.parts) for gc_object in gc.get_objects())

    gc.collect()
    num_pending_before = count_pending_weights()
    gc.disable()
    try:
        pipeline = open_pipeline(checkpoint_folder, **INT4)
        assert count_pending_weights() == num_pending_before, (
            "pending weights must be freed without the garbage collector"
        )
    finally:
        gc.enable()
    assert pipeline.session.reservations.num_bytes == 0


def test_a_missing_weight_is_reported_during_calibration(checkpoint_folder: Path) -> None:
    file = checkpoint_folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(WeightsError, match=r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight$"):
        open_pipeline(checkpoint_folder, **INT4)


@needs_kernels
def test_non_finite_statistics_weigh_all_inputs_equally(checkpoint_folder: Path) -> None:
    file = checkpoint_folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, file)
    packed_weight = load_blocks(checkpoint_folder)[1].mlp.down.packed
    encoding, weight = ENCODINGS[packed_weight.encoding], tensors["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(unpack_linear(packed_weight), encoding.unpack(encoding.pack(weight)))


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8"])
def test_float_and_int8_encodings_are_not_calibrated(
    checkpoint_folder: Path, encoding: str, recorded_inputs: list[tuple[Tensor, Tensor | None]]
) -> None:
    open_pipeline(checkpoint_folder, quantization_encoding=encoding)
    assert not recorded_inputs


@needs_kernels
def test_weights_from_a_packed_file_are_not_calibrated(
    checkpoint_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recorded_inputs: list[tuple[Tensor, Tensor | None]],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pack_checkpoint(PipelineConfig.from_flat({"model_path": str(checkpoint_folder), **INT4}))
    assert recorded_inputs
    recorded_inputs.clear()
    open_pipeline(checkpoint_folder, **INT4)
    assert not recorded_inputs
