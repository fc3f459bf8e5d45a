"""SmolLM 3."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: every third layer without a rotary embedding."""
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 4,
        "pad_token_id": 0,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "no_rope_layer_interval": 3,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    }


ARCHITECTURE = SupportedArchitecture(
    name="smollm3",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:SmolLM3Model",
    example_repo_ids=("HuggingFaceTB/SmolLM3-3B",),
    tiny_config=tiny_config,
)
