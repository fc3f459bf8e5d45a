"""Arcee Foundation Models."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: ungated feed-forward layers with squared ReLU."""
    return {
        "architectures": ["ArceeForCausalLM"],
        "model_type": "arcee",
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
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "relu2",
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="arcee",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:ArceeModel",
    example_repo_ids=("arcee-ai/AFM-4.5B",),
    tiny_config=tiny_config,
)
