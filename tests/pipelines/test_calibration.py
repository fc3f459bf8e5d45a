"""What is found out about the inputs of linear layers, and what a load makes of it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import write_checkpoint
from support.running import open_pipeline
from torch import Tensor

from penstock import host_memory
from penstock.assembly import pack_checkpoint
from penstock.errors import WeightsError
from penstock.kernels import ENCODINGS, PackedLinear, unpack_linear
from penstock.kernels.reference import ReferenceOps
from penstock.pipelines import PIPELINE_REGISTRY, PipelineConfig
from penstock.pipelines.packed_file import packed_file

INT4 = {"quantization_encoding": "int4"}
DECODERS = [one.name for one in PIPELINE_REGISTRY.architectures if one.tiny_config is not None]


def checkpoint_of(name: str, folder: Path, **sizes: int) -> Path:
    (architecture,) = (one for one in PIPELINE_REGISTRY.architectures if one.name == name)
    assert architecture.tiny_config is not None
    return write_checkpoint(folder, architecture.tiny_config() | sizes)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Layers that are large enough for 4 bits."""
    return checkpoint_of("llama", tmp_path / "llama", hidden_size=192, intermediate_size=256, head_dim=32)


def importance_of(checkpoint: Path) -> dict[str, Tensor]:
    pipeline = open_pipeline(checkpoint, quantization_encoding="bfloat16")
    model: Any = pipeline.model
    config = PipelineConfig.from_flat({"model_path": str(checkpoint), **INT4})
    found: dict[str, Tensor] = type(model).input_importance(
        config, model.weights, pipeline.session.ops, model.max_seq_len
    )
    return found


@pytest.mark.parametrize("name", DECODERS)
def test_every_layer_of_every_architecture_is_looked_at(name: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(name, tmp_path / name)
    found = importance_of(checkpoint)
    assert len(found) >= 4
    for layer, importance in found.items():
        assert importance.isfinite().all(), layer
        assert float(importance.min()) > 0
        torch.testing.assert_close(importance.mean(), torch.tensor(1.0), rtol=1e-3, atol=0)
    again = importance_of(checkpoint)
    assert all(torch.equal(found[layer], again[layer]) for layer in found)


def test_it_is_the_mean_square_of_what_a_layer_is_given(tiny: Path) -> None:
    """Of the first layer: of the embeddings, normed."""
    file = tiny / "model.safetensors"
    tensors = load_file(file)
    norm = tensors["model.layers.0.input_layernorm.weight"]
    norm[3] = 50.0
    save_file(tensors, file)
    found = importance_of(tiny)
    q = found["model.layers.0.self_attn.q_proj"]
    assert int(q.argmax()) == 3
    assert torch.equal(q, found["model.layers.0.self_attn.v_proj"])
    tokens = torch.from_numpy(
        np.random.default_rng(0).integers(0, len(tensors["model.embed_tokens.weight"]), 64)
    )
    x = tensors["model.embed_tokens.weight"].bfloat16().float()[tokens]
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm
    squares = normed.square().mean(0)
    torch.testing.assert_close(q, squares / squares.mean() + 1e-6, rtol=0.05, atol=1e-4)


def test_a_load_fits_its_scales_to_it(tiny: Path) -> None:
    file = tiny / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[::7] = 20.0
    save_file(tensors, file)
    found = importance_of(tiny)
    model: Any = open_pipeline(tiny, **INT4).model
    packed: PackedLinear = model.network.blocks[0].attention.qkv.packed
    weight = torch.cat([tensors[f"{part.name}.weight"] for part in packed.slices])
    kind = ENCODINGS["int4"]
    importance = found["model.layers.0.self_attn.q_proj"]
    expected = kind.unpack(kind.pack(weight, importance))
    assert torch.equal(unpack_linear(packed), expected)
    assert not torch.equal(expected, kind.unpack(kind.pack(weight)))


def test_a_file_of_packed_weights_is_what_a_load_packs(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = PipelineConfig.from_flat({"model_path": str(tiny), **INT4})
    loaded: Any = open_pipeline(tiny, **INT4).model
    pack_checkpoint(config)
    assert packed_file(config.model).is_file()
    mapped: Any = open_pipeline(tiny, **INT4).model
    for one, other in zip(loaded.network.blocks, mapped.network.blocks, strict=True):
        assert torch.equal(unpack_linear(one.mlp.down.packed), unpack_linear(other.mlp.down.packed))


def test_nothing_of_it_stays(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_promises", WeakSet())
    gc.disable()
    try:
        pipeline = open_pipeline(tiny, **INT4)
        assert host_memory.num_promised() == 0, "rows that nobody will pack are let go of"
    finally:
        gc.enable()
    assert pipeline.model is not None


def test_a_model_with_faults_is_refused_as_ever(tiny: Path) -> None:
    file = tiny / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(WeightsError, match=r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight$"):
        open_pipeline(tiny, **INT4)


def test_numbers_that_are_none_leave_all_inputs_alike(tiny: Path) -> None:
    file = tiny / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, file)
    found = importance_of(tiny)
    assert "model.layers.0.mlp.down_proj" in found
    assert "model.layers.1.mlp.down_proj" not in found
    open_pipeline(tiny, **INT4)


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8"])
def test_other_encodings_ask_for_nothing(tiny: Path, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pipelines.decoder.measure_importance", None)
    open_pipeline(tiny, quantization_encoding=encoding)


def test_the_reference_kernels_can_do_it(tiny: Path) -> None:
    model: Any = open_pipeline(tiny).model
    config = PipelineConfig.from_flat({"model_path": str(tiny), **INT4})
    ops, best = ReferenceOps(), model.session.ops
    found, expected = (
        type(model).input_importance(config, model.weights, one, model.max_seq_len) for one in (ops, best)
    )
    assert found.keys() == expected.keys()
    for layer in found:
        torch.testing.assert_close(found[layer], expected[layer], rtol=0.1, atol=1e-2)
