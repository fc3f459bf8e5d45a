"""Llama 4, the text part of Scout and Maverick: ``llama4_text`` models."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: chunked attention, layers without RoPE, a dense layer."""
    return {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 40,
        "intermediate_size_mlp": 88,
        "num_local_experts": 5,
        "num_experts_per_tok": 1,
        "moe_layers": [0, 2, 3],
        "attention_chunk_size": 24,
        "no_rope_layers": [1, 0, 1, 1],
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "floor_scale": 16,
        "attn_scale": 0.5,
        "attention_bias": True,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


ARCHITECTURE = SupportedArchitecture(
    name="llama4_text",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Llama4TextModel",
    example_repo_ids=(),
    tiny_config=tiny_config,
)
