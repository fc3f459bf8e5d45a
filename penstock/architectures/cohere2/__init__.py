"""Command R7B, Command A and Tiny Aya."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: three of four layers have a window and RoPE."""
    return {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "head_dim": 16,
        "layer_norm_eps": 1e-05,
        "logit_scale": 0.37,
        "sliding_window": 24,
        "sliding_window_pattern": 3,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="cohere2",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Cohere2Model",
    example_repo_ids=(
        "CohereLabs/c4ai-command-r7b-12-2024",
        "CohereLabs/c4ai-command-a-03-2025",
    ),
    tiny_config=tiny_config,
)
