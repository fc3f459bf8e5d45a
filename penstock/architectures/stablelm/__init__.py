"""StableLM: StableLM 2, StableLM 3B and Stable Code."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: parallel attention and feed-forward, and a norm per head."""
    return {
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        "hidden_size": 96,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "layer_norm_eps": 1e-05,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": True,
        "qk_layernorm": True,
        "use_parallel_residual": True,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="stablelm",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:StableLmModel",
    example_repo_ids=(
        "stabilityai/stablelm-2-1_6b-chat",
        "stabilityai/stablelm-zephyr-3b",
    ),
    tiny_config=tiny_config,
)
