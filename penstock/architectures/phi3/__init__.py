"""Phi 3: Phi-3-mini and -medium, Phi-3.5-mini, Phi-4 and Phi-4-mini."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: a sliding window in all layers."""
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-05,
        "original_max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "sliding_window": 40,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="phi3",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Phi3Model",
    example_repo_ids=("microsoft/Phi-3-mini-4k-instruct", "microsoft/Phi-4-mini-instruct"),
    tiny_config=tiny_config,
)
