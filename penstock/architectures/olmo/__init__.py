"""OLMo: OLMo 1B and 7B, up to version 0724."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests, with clipped queries, keys and values."""
    return {
        "architectures": ["OlmoForCausalLM"],
        "model_type": "olmo",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "clip_qkv": 1.5,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="olmo",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:OlmoModel",
    example_repo_ids=(
        "allenai/OLMo-1B-hf",
        "allenai/OLMo-7B-0724-hf",
    ),
    tiny_config=tiny_config,
)
