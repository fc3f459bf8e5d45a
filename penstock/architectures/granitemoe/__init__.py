"""Granite with mixture-of-experts layers: Granite 3 1B-A400M, 3B-A800M and other ``granitemoe`` models."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: multipliers other than 1."""
    return {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 3.0,
        "attention_bias": False,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


ARCHITECTURE = SupportedArchitecture(
    name="granitemoe",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:GraniteMoeModel",
    example_repo_ids=(
        "ibm-granite/granite-3.1-1b-a400m-instruct",
        "ibm-granite/granite-3.1-3b-a800m-instruct",
    ),
    tiny_config=tiny_config,
)
