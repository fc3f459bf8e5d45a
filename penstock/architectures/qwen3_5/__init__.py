"""Qwen3.5 for text and images; videos are refused."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: 7 x 7 learned positions, linear and full attention."""
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "image_token_id": 129,
        "video_token_id": 128,
        "vision_start_token_id": 127,
        "vision_end_token_id": 126,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_text",
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
            "intermediate_size": 88,
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
    name="qwen3_5",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Qwen35VisionModel",
    media="media:Qwen35VisionFamily",
    example_repo_ids=("Qwen/Qwen3.5-4B", "Qwen/Qwen3.6-27B"),
    tiny_config=tiny_config,
)
