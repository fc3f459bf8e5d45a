"""Hunyuan dense models: 0.5B, 1.8B, 4B, 7B and Hunyuan-MT."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: dynamic RoPE, then norms of queries and keys."""
    return {
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "model_type": "hunyuan_v1_dense",
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
        "rope_scaling": {"type": "dynamic", "alpha": 100.0, "factor": 1.0},
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="hunyuan_v1_dense",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:HunyuanV1DenseModel",
    example_repo_ids=(
        "tencent/Hunyuan-7B-Instruct",
        "tencent/Hunyuan-0.5B-Instruct",
    ),
    tiny_config=tiny_config,
)
