"""Statistics of the inputs of linear layers, and their use in a load."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import DECODERS, write_checkpoint
from support.running import open_pipeline
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
NAMES = [one.name for one in DECODERS if one.tiny_config is not None]


def checkpoint_of(name: str, folder: Path, **sizes: int) -> Path:
    (architecture,) = (one for one in DECODERS if one.name == name)
    assert architecture.tiny_config is not None
    return write_checkpoint(folder, architecture.tiny_config() | sizes)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Layers that are large enough for few bits."""
    return checkpoint_of("llama", tmp_path / "llama", hidden_size=192, intermediate_size=256, head_dim=32)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor | None]]:
    """Record the inputs of layers and their statistics."""
    found: list[tuple[Tensor, Tensor | None]] = []

    def watched(x: Tensor) -> Tensor | None:
        found.append((x.clone(), activation_statistics(x)))
        return found[-1][1]

    monkeypatch.setattr(calibration, "activation_statistics", watched)
    return found


def blocks_of(checkpoint: Path) -> Any:
    model: Any = open_pipeline(checkpoint, **INT4).model
    return model.network.blocks


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_layers_of_every_architecture_are_calibrated(
    name: str, tmp_path: Path, seen: list[tuple[Tensor, Tensor | None]]
) -> None:
    open_pipeline(checkpoint_of(name, tmp_path / name, **large_sizes(name)), **INT4)
    once = seen[:]
    assert len(once) >= 2
    for x, importance in once:
        assert len(x) == NUM_TOKENS
        assert importance is not None
        assert importance.isfinite().all()
        assert float(importance.min()) > 0
        torch.testing.assert_close(importance.mean(), torch.tensor(1.0), rtol=1e-3, atol=0)
    open_pipeline(tmp_path / name, **INT4)
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(once, seen[len(once) :], strict=True))


def large_sizes(name: str) -> dict[str, int]:
    """Return sizes of layers that are large enough for encodings with few bits."""
    if name == "gpt2":
        return {"n_embd": 192, "n_inner": 256}
    return {"hidden_size": 192, "intermediate_size": 256, "head_dim": 32, "num_attention_heads": 6}


def test_importance_is_the_mean_square() -> None:
    x = torch.tensor([[1.0, 0.0, -2.0], [3.0, 0.0, 0.0]]).bfloat16()
    torch.testing.assert_close(activation_statistics(x), torch.tensor([5.0, 0.0, 2.0]) / (7 / 3) + 1e-6)
    assert activation_statistics(torch.zeros(2, 3)) is None
    assert activation_statistics(torch.tensor([[1.0, torch.nan]])) is None


@pytest.mark.parametrize("has_kernels", [pytest.param(True, marks=needs_kernels), False])
def test_a_load_fits_its_scales_to_the_statistics(
    tiny: Path,
    has_kernels: bool,
    seen: list[tuple[Tensor, Tensor | None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_kernels:
        monkeypatch.setattr(library, "ABI", -1)
    file = tiny / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[::7] = 20.0
    save_file(tensors, file)
    packed: PackedLinear = blocks_of(tiny)[0].attention.qkv.packed
    assert packed.layout.name == ("panels" if has_kernels else "rows")
    x, importance = seen[0]
    tokens = torch.from_numpy(
        np.random.default_rng(0).integers(0, len(tensors["model.embed_tokens.weight"]), NUM_TOKENS)
    )
    embedded = tensors["model.embed_tokens.weight"].bfloat16().float()[tokens]
    normed = embedded * (embedded.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    expected = normed * tensors["model.layers.0.input_layernorm.weight"]
    torch.testing.assert_close(x.float(), expected, rtol=0.02, atol=0.02)
    weight = torch.cat([tensors[f"{part.name}.weight"] for part in packed.slices])
    kind = ENCODINGS[packed.encoding]
    fitted = kind.unpack(kind.pack(weight, importance))
    assert torch.equal(unpack_linear(packed), fitted)
    assert not torch.equal(fitted, kind.unpack(kind.pack(weight)))


def test_a_file_of_packed_weights_is_what_a_load_packs(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = PipelineConfig.from_flat({"model_path": str(tiny), **INT4})
    loaded = blocks_of(tiny)
    pack_checkpoint(config)
    assert config.model.packed_key.file.is_file()
    mapped = blocks_of(tiny)
    for one, other in zip(loaded, mapped, strict=True):
        assert torch.equal(unpack_linear(one.mlp.down.packed), unpack_linear(other.mlp.down.packed))


@needs_kernels
def test_its_progress_counts_every_weight(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: dict[str, list[int]] = {}

    class Counting(LoadingProgress):
        def __init__(self, num_bytes: int, *, title: str = "loading") -> None:
            super().__init__(num_bytes, title=title)
            self.seen = counted.setdefault(title, [num_bytes])

        def advance(self, num_bytes: int) -> None:
            self.seen.append(num_bytes)

    monkeypatch.setattr(network_model, "LoadingProgress", Counting)
    blocks_of(tiny)
    tensors = load_file(tiny / "model.safetensors")
    narrow = ("q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    size = sum(tensor.nbytes for name, tensor in tensors.items() if any(part in name for part in narrow))
    assert counted["quantising"][0] == sum(counted["quantising"][1:]) == size
    assert set(counted) == {"loading", "quantising"}


def test_calibration_leaves_no_state(tiny: Path) -> None:
    def waiting() -> int:
        return sum(type(one) is LazyWeight and bool(one.parts) for one in gc.get_objects())

    gc.collect()
    before = waiting()
    gc.disable()
    try:
        pipeline = open_pipeline(tiny, **INT4)
        assert waiting() == before, "rows that are never packed are freed without the garbage collector"
    finally:
        gc.enable()
    assert pipeline.session.reservations.num_bytes == 0


def test_a_checkpoint_with_faults_is_refused_during_calibration(tiny: Path) -> None:
    file = tiny / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(WeightsError, match=r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight$"):
        open_pipeline(tiny, **INT4)


@needs_kernels
def test_non_finite_statistics_weigh_all_inputs_equally(tiny: Path) -> None:
    file = tiny / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, file)
    packed = blocks_of(tiny)[1].mlp.down.packed
    kind, weight = ENCODINGS[packed.encoding], tensors["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(unpack_linear(packed), kind.unpack(kind.pack(weight)))


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8"])
def test_other_encodings_are_not_calibrated(
    tiny: Path, encoding: str, seen: list[tuple[Tensor, Tensor | None]]
) -> None:
    open_pipeline(tiny, quantization_encoding=encoding)
    assert not seen


@needs_kernels
def test_weights_that_were_packed_are_not_calibrated(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[tuple[Tensor, Tensor | None]]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pack_checkpoint(PipelineConfig.from_flat({"model_path": str(tiny), **INT4}))
    assert seen
    seen.clear()
    open_pipeline(tiny, **INT4)
    assert not seen
