"""Qwen2.5-VL for images of any size; videos are refused."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: windows in two of three vision blocks."""
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "image_token_id": 129,
        "video_token_id": 128,
        "vision_start_token_id": 127,
        "vision_end_token_id": 126,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "hidden_size": 48,
            "intermediate_size": 88,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "vocab_size": 130,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]},
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        "vision_config": {
            "depth": 3,
            "hidden_size": 48,
            "out_hidden_size": 48,
            "intermediate_size": 56,
            "num_heads": 3,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    }


ARCHITECTURE = SupportedArchitecture(
    name="qwen2_5_vl",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Qwen25VisionModel",
    media="media:QwenVisionFamily",
    example_repo_ids=("Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct"),
    tiny_config=tiny_config,
)
