"""Idefics3: Llama 3 with a SigLIP vision encoder that reads tiles of an image."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: tiles of 4 x 4 patches, which become 4 tokens."""
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": 129,
        "scale_factor": 2,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "llama",
            "hidden_size": 48,
            "intermediate_size": 88,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "vocab_size": 130,
            "max_position_embeddings": 256,
            "pad_token_id": 0,
        },
        "vision_config": {
            "hidden_size": 48,
            "intermediate_size": 56,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "image_size": 32,
            "patch_size": 8,
        },
    }


ARCHITECTURE = SupportedArchitecture(
    name="idefics3",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Idefics3Model",
    media="media:Idefics3Family",
    example_repo_ids=("HuggingFaceM4/Idefics3-8B-Llama3",),
    tiny_config=tiny_config,
)
