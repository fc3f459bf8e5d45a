"""Qwen3-Next: linear attention and experts."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: linear and full attention, experts, a dense layer."""
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-03,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "attention_bias": False,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "intermediate_size": 88,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [2],
        "tie_word_embeddings": False,
    }


ARCHITECTURE = SupportedArchitecture(
    name="qwen3_next",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Qwen3NextModel",
    example_repo_ids=("Qwen/Qwen3-Next-80B-A3B-Instruct",),
    tiny_config=tiny_config,
)
