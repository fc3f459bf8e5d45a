"""LLaVA: LLaVA 1.5, BakLLaVA and other models with ``model_type`` ``llava``, which read images."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: a CLIP vision encoder for 16 patches and a Llama decoder."""
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 129,
        "image_seq_length": 16,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 40,
            "intermediate_size": 72,
            "num_hidden_layers": 3,
            "num_attention_heads": 5,
            "image_size": 28,
            "patch_size": 7,
            "projection_dim": 40,
        },
        "text_config": {
            "model_type": "llama",
            "hidden_size": 48,
            "intermediate_size": 88,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "vocab_size": 130,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "initializer_range": 0.2,
        },
        "tie_word_embeddings": False,
    }


ARCHITECTURE = SupportedArchitecture(
    name="llava",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:LlavaModel",
    media="images:LlavaImages",
    example_repo_ids=("llava-hf/llava-1.5-7b-hf", "llava-hf/bakLlava-v1-hf"),
    tiny_config=tiny_config,
)
