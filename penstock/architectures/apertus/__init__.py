"""Apertus."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: ungated feed-forward layers with xIELU."""
    return {
        "architectures": ["ApertusForCausalLM"],
        "model_type": "apertus",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-05,
        "rope_theta": 12000000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "attention_bias": False,
        "hidden_act": "xielu",
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="apertus",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:ApertusModel",
    example_repo_ids=("swiss-ai/Apertus-8B-Instruct-2509",),
    tiny_config=tiny_config,
)
