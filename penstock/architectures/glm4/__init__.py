"""GLM-4-0414 and GLM-Z1: 9B and 32B."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: interleaved RoPE in half of each head, and biases."""
    return {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "pad_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="glm4",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Glm4Model",
    example_repo_ids=(
        "zai-org/GLM-4-9B-0414",
        "zai-org/GLM-Z1-9B-0414",
    ),
    tiny_config=tiny_config,
)
