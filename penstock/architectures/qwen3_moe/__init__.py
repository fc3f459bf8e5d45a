"""Qwen 3 with experts: Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder and other ``qwen3_moe`` models."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: one dense layer between layers with experts."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 48,
        "intermediate_size": 88,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }


ARCHITECTURE = SupportedArchitecture(
    name="qwen3_moe",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Qwen3MoeModel",
    example_repo_ids=("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-Coder-30B-A3B-Instruct"),
    tiny_config=tiny_config,
)
