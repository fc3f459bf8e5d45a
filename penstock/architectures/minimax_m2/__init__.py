"""MiniMax-M2: MiniMax-M2, M2.1 and other ``minimax_m2`` models."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: RoPE in half of each head."""
    return {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rotary_dim": 8,
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "bos_token_id": None,
        "eos_token_id": None,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


ARCHITECTURE = SupportedArchitecture(
    name="minimax_m2",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:MiniMaxM2Model",
    example_repo_ids=("MiniMaxAI/MiniMax-M2", "MiniMaxAI/MiniMax-M2.1"),
    tiny_config=tiny_config,
)
