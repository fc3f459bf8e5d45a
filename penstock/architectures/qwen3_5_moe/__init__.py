"""Qwen3.5 with experts for text and images; videos are refused."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: 7 x 7 learned positions, linear and full attention."""
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "image_token_id": 129,
        "video_token_id": 128,
        "vision_start_token_id": 127,
        "vision_end_token_id": 126,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 130,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-03,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.75,
                "mrope_section": [3, 2, 1],
            },
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "pad_token_id": 0,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        "vision_config": {
            "depth": 3,
            "hidden_size": 48,
            "out_hidden_size": 48,
            "intermediate_size": 56,
            "num_heads": 3,
            "patch_size": 4,
            "num_position_embeddings": 49,
        },
    }


ARCHITECTURE = SupportedArchitecture(
    name="qwen3_5_moe",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Qwen35MoeVisionModel",
    media="media:Qwen35MoeVisionFamily",
    example_repo_ids=("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.6-35B-A3B"),
    tiny_config=tiny_config,
)
