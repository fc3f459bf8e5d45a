"""OLMo 2."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: norms after attention and feed-forward layers."""
    return {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


ARCHITECTURE = SupportedArchitecture(
    name="olmo2",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Olmo2Model",
    example_repo_ids=("allenai/OLMo-2-0425-1B-Instruct",),
    tiny_config=tiny_config,
)
