"""Seed-OSS: Seed-OSS-36B-Instruct and other ``seed_oss`` models."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: biases of queries, keys and values, but not of the output."""
    return {
        "architectures": ["SeedOssForCausalLM"],
        "model_type": "seed_oss",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "head_dim": 16,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "pad_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="seed_oss",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:SeedOssModel",
    example_repo_ids=("ByteDance-Seed/Seed-OSS-36B-Instruct",),
    tiny_config=tiny_config,
)
