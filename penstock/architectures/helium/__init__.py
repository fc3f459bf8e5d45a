"""Helium: Helium 1 and its previews."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: interleaved RoPE."""
    return {
        "architectures": ["HeliumForCausalLM"],
        "model_type": "helium",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-08,
        "rope_theta": 100000.0,
        "head_dim": 8,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "pad_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="helium",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:HeliumModel",
    example_repo_ids=("kyutai/helium-1-2b",),
    tiny_config=tiny_config,
)
