"""Gemma: Gemma 1, CodeGemma and other models with ``model_type`` ``gemma``."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: a head size other than hidden / heads, one kv head."""
    return {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "head_dim": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="gemma",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:GemmaModel",
    example_repo_ids=(
        "google/gemma-2b-it",
        "google/codegemma-7b-it",
    ),
    tiny_config=tiny_config,
)
