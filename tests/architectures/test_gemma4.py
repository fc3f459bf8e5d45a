"""Gemma 4: tensors that are not read, the memory plan, and adapters beside stacked experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import peft_logits, write_adapter
from support.checkpoints import VISION_DECODERS, make_tiny_config, write_checkpoint
from support.gguf_files import write_gguf
from support.networks import weight_bytes
from support.pipeline_steps import make_context, open_pipeline, random_tokens, step_logits
from support.vision import forward_logits, gemma4_prompt, save_vision_model

from penstock.architectures.gemma4_text.model import Gemma4TextModel
from penstock.config import HuggingFaceConfig, PipelineConfig
from penstock.distributed import Shard
from penstock.errors import InputError
from penstock.memory import estimate_packed_size
from penstock.memory.shares import rank_shares

TOKENS = random_tokens(40, 120, seed=3)


def add_tensors(folder: Path, prefix: str, layers: list[tuple[int, int]], **others: torch.Tensor) -> None:
    """Add keys and values of layers, given as pairs of index and head size, and other tensors to a file."""
    tensors = load_file(folder / "model.safetensors")
    for layer, head_dim in layers:
        name = f"{prefix}layers.{layer}.self_attn"
        for part in ("k_proj", "v_proj"):
            tensors[f"{name}.{part}.weight"] = torch.randn(3 * head_dim, 48)
        tensors[f"{name}.k_norm.weight"] = torch.randn(head_dim)
    save_file(tensors | others, folder / "model.safetensors", metadata={"format": "pt"})


def compute_logits(checkpoint: Path, **config: Any) -> torch.Tensor:
    context = make_context(TOKENS, log_probabilities_echo=True)
    return step_logits(open_pipeline(checkpoint, **config), [context])[0]


def test_stored_keys_of_layers_that_read_other_keys_are_not_loaded(tmp_path: Path) -> None:
    """The published E2B and E4B have keys and values in all layers, but the last layers read other keys."""
    folder = write_checkpoint(tmp_path / "text", make_tiny_config("gemma4_text"))
    expected, size = compute_logits(folder), open_pipeline(folder).memory_plan.weights_size
    add_tensors(folder, "model.", [(4, 16), (5, 32)])
    pipeline = open_pipeline(folder)
    assert torch.equal(compute_logits(folder), expected)
    assert pipeline.memory_plan.weights_size == size
    assert weight_bytes(pipeline) <= size
    file = write_gguf(folder, tmp_path / "m.gguf")
    torch.testing.assert_close(compute_logits(file), expected, atol=1e-4, rtol=0)


def test_weights_of_the_audio_encoder_are_not_loaded(tmp_path: Path) -> None:
    (architecture,) = (candidate for candidate in VISION_DECODERS if candidate.name == "gemma4")
    model = save_vision_model(architecture, tmp_path)
    assert architecture.tiny_config is not None
    prompt = gemma4_prompt(architecture.tiny_config())
    expected, size = prompt.logits(model), open_pipeline(tmp_path).memory_plan.weights_size
    audio = {f"model.{name}.weight": torch.ones(300, 300) for name in ("audio_tower.a", "embed_audio.b")}
    add_tensors(tmp_path, "model.language_model.", [(4, 16), (5, 32)], **audio)
    pipeline = open_pipeline(tmp_path)
    assert pipeline.memory_plan.weights_size == size
    logits = forward_logits(pipeline, [prompt.context()])
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=0)


def test_an_image_with_too_many_patches_along_a_side_is_refused(tmp_path: Path) -> None:
    (architecture,) = (candidate for candidate in VISION_DECODERS if candidate.name == "gemma4")
    save_vision_model(architecture, tmp_path)
    assert architecture.tiny_config is not None
    prompt = gemma4_prompt(architecture.tiny_config(), grids=((2, 66), (4, 4)))
    pipeline: Any = open_pipeline(tmp_path)
    with pytest.raises(InputError, match="66 x 2 patches, but the encoder has positions for 64"):
        pipeline.model.encode_images(prompt.images)


def test_the_memory_plan_divides_the_table_of_per_layer_embeddings() -> None:
    config = HuggingFaceConfig(make_tiny_config("gemma4_text"))
    share = rank_shares(Gemma4TextModel.tensor_names(config), Shard(rank=0, world_size=3), 3)
    shares = {
        "model.embed_tokens_per_layer.weight": 1 / 3,
        "model.embed_tokens.weight": 1 / 3,
        "model.layers.0.per_layer_input_gate.weight": 1.0,
        "model.layers.0.per_layer_projection.weight": 1.0,
        "model.layers.0.mlp.down_proj.weight": 1 / 3,
        "model.per_layer_model_projection.weight": 1.0,
    }
    assert {name: share(name) for name in shares} == pytest.approx(shares)


def test_the_estimate_of_packed_weights_does_not_count_the_per_layer_table(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, make_tiny_config("gemma4_text"))
    pipeline_config = PipelineConfig.from_flat({"model_path": str(folder), "quantization_encoding": "int8"})
    tensors = load_file(folder / "model.safetensors")
    tables = ("model.embed_tokens.weight", "model.embed_tokens_per_layer.weight")
    linear_weights = sum(
        tensor.numel() for name, tensor in tensors.items() if tensor.dim() > 1 and name not in tables
    )
    assert estimate_packed_size(pipeline_config) == linear_weights + tensors[tables[0]].numel()


def test_an_adapter_of_the_mlp_does_not_need_matrices_for_stacked_experts(tmp_path: Path) -> None:
    """PEFT has no modules for stacked experts, although target_modules matches the names of their parts."""
    pytest.importorskip("peft")
    folder = write_checkpoint(tmp_path / "model", make_tiny_config("gemma4_text"))
    modules = r".*layers\..*(q|k|v|o|gate|up|down)_proj"
    adapter = write_adapter(folder, tmp_path / "adapter", target_modules=modules)
    assert json.loads((adapter / "adapter_config.json").read_text())["target_modules"] == modules
    pipeline = open_pipeline(folder, lora=(f"a={adapter}",))
    context = make_context(TOKENS, log_probabilities_echo=True, adapter="a")
    expected = peft_logits(folder, adapter, TOKENS)
    logits = step_logits(pipeline, [context])[0]
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)
