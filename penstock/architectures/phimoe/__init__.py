"""Phi 3.5 MoE: Phi-3.5-MoE, Phi-mini-MoE, Phi-tiny-MoE and other ``phimoe`` models."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: biases, and a high ``router_jitter_noise``."""
    return {
        "architectures": ["PhimoeForCausalLM"],
        "model_type": "phimoe",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "num_local_experts": 7,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.4,
        "sliding_window": None,
        "attention_bias": True,
        "lm_head_bias": True,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


ARCHITECTURE = SupportedArchitecture(
    name="phimoe",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:PhimoeModel",
    example_repo_ids=("microsoft/Phi-3.5-MoE-instruct", "microsoft/Phi-mini-MoE-instruct"),
    tiny_config=tiny_config,
)
