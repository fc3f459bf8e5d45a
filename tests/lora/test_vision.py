"""Adapters on the decoder of vision models: logits equal those of PEFT, and encoder adapters are refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import save_adapter
from support.checkpoints import VISION_DECODERS
from support.pipeline_steps import open_pipeline
from support.vision import PROMPTS, forward_logits, save_vision_model

from penstock.architectures.registry import SupportedArchitecture
from penstock.errors import WeightsError

ADAPTER_CONFIGS: dict[str, dict[str, Any]] = {
    "smolvlm": {
        "target_modules": r".*text_model\.layers\.[02].*\.(q_proj|down_proj)|lm_head",
        "rank_pattern": {r"text_model\.layers\.2\.self_attn\.q_proj": 7},
        "alpha_pattern": {"text_model.layers.0.mlp.down_proj": 3},
    },
    "gemma3": {"target_modules": r".*language_model\..*(q|k|v|o)_proj", "use_rslora": True},
    "qwen3_vl": {"target_modules": ["gate_proj", "o_proj"]},
}


def find_architecture(name: str) -> SupportedArchitecture:
    (result,) = (candidate for candidate in VISION_DECODERS if candidate.name == name)
    return result


def add_random_adapter(model: Any, **config: Any) -> Any:
    """Return the model with a PEFT adapter of random matrices."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 8} | config)).eval()
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.1)
    return peft_model


@pytest.mark.parametrize("name", ADAPTER_CONFIGS)
def test_logits_equal_peft(name: str, tmp_path: Path) -> None:
    model = save_vision_model(find_architecture(name), tmp_path / "base")
    tiny_config = find_architecture(name).tiny_config
    assert tiny_config is not None
    prompt = PROMPTS[name](tiny_config())
    plain_logits = prompt.logits(model)
    peft_model = add_random_adapter(model, **ADAPTER_CONFIGS[name])
    save_adapter(peft_model, tmp_path / "adapter")
    expected = prompt.logits(peft_model)
    pipeline = open_pipeline(tmp_path / "base", lora=(f"tone={tmp_path / 'adapter'}",))
    context = prompt.context(adapter="tone")
    torch.testing.assert_close(forward_logits(pipeline, [context]), expected, atol=1e-4, rtol=1e-5)
    assert float((expected - plain_logits).abs().max()) > 0.01
    pipeline.release(context)
    plain_context = prompt.context()
    torch.testing.assert_close(forward_logits(pipeline, [plain_context]), plain_logits, atol=1e-4, rtol=1e-5)
    pipeline.release(plain_context)


def test_adapters_with_older_module_names_are_read(tmp_path: Path) -> None:
    """Earlier versions of transformers named the modules of Gemma 3 ``language_model.model``."""
    model = save_vision_model(find_architecture("gemma3"), tmp_path / "base")
    tiny_config = find_architecture("gemma3").tiny_config
    assert tiny_config is not None
    prompt = PROMPTS["gemma3"](tiny_config())
    peft_model = add_random_adapter(model, target_modules=r".*language_model\..*q_proj")
    file = save_adapter(peft_model, tmp_path / "adapter") / "adapter_model.safetensors"
    tensors = load_file(file)
    renamed_tensors = {
        name.replace("model.language_model.layers", "language_model.model.layers"): tensor
        for name, tensor in tensors.items()
    }
    assert renamed_tensors.keys() != tensors.keys()
    save_file(renamed_tensors, file)
    pipeline = open_pipeline(tmp_path / "base", lora=(f"tone={tmp_path / 'adapter'}",))
    context = prompt.context(adapter="tone")
    torch.testing.assert_close(
        forward_logits(pipeline, [context]), prompt.logits(peft_model), atol=1e-4, rtol=1e-5
    )


def test_adapters_of_the_encoder_are_refused(tmp_path: Path) -> None:
    model = save_vision_model(find_architecture("smolvlm"), tmp_path / "base")
    save_adapter(add_random_adapter(model, target_modules=["q_proj"]), tmp_path / "adapter")
    with pytest.raises(WeightsError, match=r"vision_model\.encoder.*not a linear layer that"):
        open_pipeline(tmp_path / "base", lora=(f"tone={tmp_path / 'adapter'}",))
