"""InternLM 3."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: biases in all linear layers, and a head size of 16."""
    return {
        "architectures": ["InternLM3ForCausalLM"],
        "model_type": "internlm3",
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
        "qkv_bias": True,
        "bias": True,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="internlm3",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:InternLM3Model",
    example_repo_ids=("internlm/internlm3-8b-instruct",),
    tiny_config=tiny_config,
)
