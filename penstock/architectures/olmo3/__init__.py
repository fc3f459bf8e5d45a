"""OLMo 3."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: sliding windows, and YaRN in layers without a window."""
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "sliding_window": 24,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="olmo3",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Olmo3Model",
    example_repo_ids=(
        "allenai/Olmo-3-7B-Instruct",
        "allenai/Olmo-3-7B-Think",
    ),
    tiny_config=tiny_config,
)
