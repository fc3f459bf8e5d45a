"""Phi: Phi-1, Phi-1.5 and Phi-2."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: norms of queries and keys, and partial RoPE."""
    return {
        "architectures": ["PhiForCausalLM"],
        "model_type": "phi",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "layer_norm_eps": 1e-05,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": True,
        "hidden_act": "gelu_new",
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="phi",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:PhiModel",
    example_repo_ids=(
        "microsoft/phi-2",
        "microsoft/phi-1_5",
    ),
    tiny_config=tiny_config,
)
