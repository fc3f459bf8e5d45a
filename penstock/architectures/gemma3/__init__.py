"""Gemma 3 4B, 12B and 27B, which read images."""

from __future__ import annotations

from penstock.architectures.gemma3_text import tiny_config as text_config
from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: images of 4 tokens, and a window of 24 tokens."""
    text = {key: value for key, value in text_config().items() if key != "architectures"}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "image_token_index": 129,
        "boi_token_index": 128,
        "eoi_token_index": 127,
        "mm_tokens_per_image": 4,
        "text_config": text,
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 48,
            "intermediate_size": 56,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "image_size": 32,
            "patch_size": 8,
            "vision_use_head": False,
        },
    }


ARCHITECTURE = SupportedArchitecture(
    name="gemma3",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Gemma3Model",
    media="media:Gemma3Family",
    example_repo_ids=("google/gemma-3-4b-it", "google/gemma-3-12b-it"),
    tiny_config=tiny_config,
)
