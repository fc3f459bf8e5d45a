"""Dense Granite 3 models."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: multipliers far from powers of two."""
    return {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 1.7,
        "attention_multiplier": 0.31,
        "residual_multiplier": 0.83,
        "logits_scaling": 1.7,
        "tie_word_embeddings": False,
    }


ARCHITECTURE = SupportedArchitecture(
    name="granite",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:GraniteModel",
    example_repo_ids=("ibm-granite/granite-3.3-2b-instruct",),
    tiny_config=tiny_config,
)
