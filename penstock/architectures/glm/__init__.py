"""GLM: GLM-4 9B and GLM-Edge, in the format of transformers."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: interleaved RoPE in half of each head, and biases."""
    return {
        "architectures": ["GlmForCausalLM"],
        "model_type": "glm",
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
    name="glm",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:GlmModel",
    example_repo_ids=(
        "zai-org/glm-4-9b-chat-hf",
        "zai-org/glm-edge-1.5b-chat",
    ),
    tiny_config=tiny_config,
)
