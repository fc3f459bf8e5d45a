"""LoRA adapters on single experts are applied. Adapters on a tensor of all experts are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import make_tiny_config, write_checkpoint
from support.pipeline_steps import make_context, open_pipeline, random_tokens, step_logits

from penstock.errors import UnsupportedFeatureError

TOKENS = random_tokens(60, 130, seed=5)


@pytest.fixture(params=["mixtral", "qwen3_moe", "gpt_oss"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base", make_tiny_config(request.param))


def write_per_expert_adapter(
    folder: Path, targets: list[str], matrices: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> Path:
    """Write an adapter in the format of older PEFT versions, with one module for each expert."""
    folder.mkdir()
    tensors = {}
    for name, (down, up) in matrices.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("family", "targets"), [("mixtral", ["w1", "w2"]), ("qwen3_moe", ["up_proj", "gate"])]
)
def test_logits_of_an_adapter_on_single_experts_equal_those_of_merged_weights(
    family: str, targets: list[str], tmp_path: Path
) -> None:
    base_folder = write_checkpoint(tmp_path / "base", make_tiny_config(family))
    tensors = load_file(base_folder / "model.safetensors")
    matrices = {}
    for name, weight in list(tensors.items()):
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in targets:
            matrices[layer] = (torch.randn(2, weight.shape[1]) / 5, torch.randn(weight.shape[0], 2) / 5)
            tensors[name] = weight + matrices[layer][1] @ matrices[layer][0]
    assert len(matrices) >= 10
    adapter = write_per_expert_adapter(tmp_path / "adapter", targets, matrices)
    merged_folder = tmp_path / "merged"
    merged_folder.mkdir()
    save_file(tensors, merged_folder / "model.safetensors", metadata={"format": "pt"})
    (merged_folder / "config.json").write_text((base_folder / "config.json").read_text())
    pipeline = open_pipeline(base_folder, enable_lora=True, lora=(f"tone={adapter}",))
    contexts = [make_context(TOKENS, adapter="tone"), make_context(TOKENS)]
    adapted_logits, plain_logits = step_logits(pipeline, contexts)
    (expected,) = step_logits(open_pipeline(merged_folder), [make_context(TOKENS)])
    torch.testing.assert_close(adapted_logits, expected, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(adapted_logits, plain_logits, atol=0.1)


def test_an_adapter_on_a_tensor_of_all_experts_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    adapter = write_per_expert_adapter(tmp_path / "adapter", ["q_proj"], {})
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["target_parameters"] = ["mlp.experts.gate_up_proj"]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedFeatureError, match="target_parameters"):
        open_pipeline(checkpoint, enable_lora=True, lora=(f"tone={adapter}",))
