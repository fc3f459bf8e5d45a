"""The text model of Qwen3.5."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: linear attention and one layer of full attention."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-03,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "attention_bias": False,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "intermediate_size": 88,
        "tie_word_embeddings": True,
    }


ARCHITECTURE = SupportedArchitecture(
    name="qwen3_5_text",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Qwen35TextModel",
    example_repo_ids=(),
    tiny_config=tiny_config,
)
