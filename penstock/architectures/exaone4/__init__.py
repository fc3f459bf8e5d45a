"""EXAONE 4."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: a window and RoPE in every second layer."""
    return {
        "architectures": ["Exaone4ForCausalLM"],
        "model_type": "exaone4",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "pad_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="exaone4",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Exaone4Model",
    example_repo_ids=(
        "LGAI-EXAONE/EXAONE-4.0-1.2B",
        "LGAI-EXAONE/EXAONE-4.0-32B",
    ),
    tiny_config=tiny_config,
)
