"""Gemma 4 for text and images; videos and audio are refused."""

from __future__ import annotations

from penstock.architectures.gemma4_text import tiny_config as text_config
from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: squares of 2 x 2 patches, clipped linear layers."""
    text = {key: value for key, value in text_config().items() if key != "architectures"}
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "image_token_id": 129,
        "boi_token_id": 128,
        "eoi_token_id": 127,
        "video_token_id": 126,
        "audio_token_id": 125,
        "boa_token_id": 124,
        "eoa_token_index": 123,
        "text_config": text | {"use_bidirectional_attention": "vision", "pad_token_id": 3},
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 48,
            "intermediate_size": 56,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "patch_size": 4,
            "position_embedding_size": 64,
            "pooling_kernel_size": 2,
            "standardize": True,
            "use_clipped_linears": True,
        },
        "audio_config": None,
    }


ARCHITECTURE = SupportedArchitecture(
    name="gemma4",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Gemma4Model",
    media="media:Gemma4Family",
    example_repo_ids=(
        "google/gemma-4-E2B-it",
        "google/gemma-4-E4B-it",
        "google/gemma-4-26B-A4B-it",
        "google/gemma-4-31B-it",
    ),
    tiny_config=tiny_config,
)
