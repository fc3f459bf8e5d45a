"""Writes small random checkpoints with transformers, and computes reference results with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.architectures.registry import PIPELINE_REGISTRY
from penstock.pipelines.core import PipelineTask

_GENERATORS = PIPELINE_REGISTRY.of_task(PipelineTask.TEXT_GENERATION)
DECODERS = tuple(architecture for architecture in _GENERATORS if architecture.media is None)
"""The records of all architectures that generate text from text."""
VISION_DECODERS = tuple(architecture for architecture in _GENERATORS if architecture.media is not None)
"""The records of all architectures that generate text from text and images.

Each of them combines an image encoder with the text decoder of another architecture.
"""


def make_tiny_config(name: str) -> dict[str, Any]:
    """Return the ``config.json`` of a small random model of an architecture that generates text."""
    (architecture,) = (candidate for candidate in _GENERATORS if candidate.name == name)
    assert architecture.tiny_config is not None
    return dict(architecture.tiny_config())


def _reads_images(config: Mapping[str, Any]) -> bool:
    return config["model_type"] in {candidate.name for candidate in VISION_DECODERS}


def _model_class(config: Mapping[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if _reads_images(config) else AutoModelForCausalLM


def skip_unknown_model_type(model_type: str) -> None:
    """Skip the test if the installed transformers has no models of this type."""
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no model type {model_type!r}")


def write_checkpoint(folder: Path, config: Mapping[str, Any], seed: int = 0) -> Path:
    """Save a model of this ``config.json`` with weights that are large enough to expose mistakes.

    transformers initializes weights with a standard deviation of 0.02 and norms with 1. With these
    values, a wrong RoPE base or a missing norm would change results by less than the tolerance. Here the
    standard deviation is 0.2, and norms are random.
    """
    from transformers import AutoConfig

    skip_unknown_model_type(config["model_type"])
    torch.manual_seed(seed)
    values = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    hf_config = AutoConfig.for_model(config["model_type"], **values, initializer_range=0.2)
    model = _model_class(config).from_config(hf_config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".weight") and ("norm" in name or ".ln_" in name):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif _reads_images(config) and parameter.dim() > 1:
                # The ranges of transformers for vision parameters do not follow `initializer_range`.
                nn.init.normal_(parameter, std=0.2)
            elif name.endswith("conv1d.weight"):
                nn.init.normal_(parameter)
            elif name.endswith((".scale", "_scale")):  # of routers and experts
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith((".bias", "_bias")):  # includes the 2-dimensional biases of experts
                nn.init.normal_(parameter, std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                nn.init.normal_(buffer, std=0.2)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def load_in_transformers(folder: Path) -> Any:
    """Load the checkpoint in transformers in float32.

    Eager attention is used because only it supports soft caps.
    """
    config = json.loads((folder / "config.json").read_text())
    model_class = _model_class(config)
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    family = sys.modules[type(model).__module__]
    if hasattr(family, "torch_chunk_gated_delta_rule"):
        # In chunks, transformers computes the delta rule less exactly than token by token.
        vars(family)["torch_chunk_gated_delta_rule"] = vars(family)["torch_recurrent_gated_delta_rule"]
    return model


def transformers_logits(model: Any, tokens: list[int]) -> torch.Tensor:  # [T, V]
    """Return the logits ``[T, V]`` after each token of one sequence, computed in one forward."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def transformers_step(model: Any, text: list[int], past: Any = None) -> tuple[torch.Tensor, Any]:  # [1, V]
    """Return the logits ``[1, V]`` after the last token of a text, and the updated cache.

    ``past`` is the cache of all tokens but the last. The cache is recomputed when the text becomes longer
    than the length of LongRoPE's short factors, as in ``generate`` of Phi 3.
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    limit = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
    if limit is not None and len(text) == limit + 1:
        past = None
    tokens = text if past is None else text[-1:]
    with torch.inference_mode():
        output = model(torch.tensor([tokens]), past_key_values=past, use_cache=True)
    return output.logits[0, -1:].float(), output.past_key_values


def transformers_greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """Return the ``count`` tokens that the greedy search of transformers generates."""
    prompt = torch.tensor([tokens])
    ids = model.generate(  # the explicit mask keeps prompt tokens that equal the padding token
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    text: list[int] = ids[0, len(tokens) :].tolist()
    return text
