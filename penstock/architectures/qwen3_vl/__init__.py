"""Dense Qwen3-VL models for images of any size; videos are refused."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: 7 x 7 learned positions, deepstack outputs of two blocks."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": 129,
        "video_token_id": 128,
        "vision_start_token_id": 127,
        "vision_end_token_id": 126,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "hidden_size": 48,
            "intermediate_size": 88,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "vocab_size": 130,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [6, 3, 2]},
            "pad_token_id": 0,
        },
        "vision_config": {
            "depth": 3,
            "hidden_size": 48,
            "out_hidden_size": 48,
            "intermediate_size": 56,
            "num_heads": 3,
            "patch_size": 4,
            "num_position_embeddings": 49,
            "deepstack_visual_indexes": [0, 1],
        },
    }


ARCHITECTURE = SupportedArchitecture(
    name="qwen3_vl",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Qwen3VisionModel",
    media="media:Qwen3VisionFamily",
    example_repo_ids=("Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3-VL-4B-Instruct"),
    tiny_config=tiny_config,
)
