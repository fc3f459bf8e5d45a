"""Nemotron and Minitron: Minitron 4B and 8B, Nemotron-4 15B and 340B."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: norms with weights 1 + w, squared ReLU and partial RoPE."""
    return {
        "architectures": ["NemotronForCausalLM"],
        "model_type": "nemotron",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "head_dim": 16,
        "norm_eps": 1e-05,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "relu2",
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="nemotron",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:NemotronModel",
    example_repo_ids=(
        "nvidia/Minitron-4B-Base",
        "mgoin/Nemotron-4-340B-Base-hf",
    ),
    tiny_config=tiny_config,
)
