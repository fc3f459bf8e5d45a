"""The text models of Gemma 4."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: per-layer embeddings and shared keys and values."""
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "global_head_dim": 32,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 5000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "hidden_size_per_layer_input": 24,
        "vocab_size_per_layer_input": 130,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "enable_moe_block": True,
        "num_experts": 3,
        "top_k_experts": 3,
        "moe_intermediate_size": 32,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }


ARCHITECTURE = SupportedArchitecture(
    name="gemma4_text",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Gemma4TextModel",
    tiny_config=tiny_config,
)
