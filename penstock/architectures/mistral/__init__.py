"""Mistral: Mistral 7B, Mistral Nemo, Mistral Small and other models with ``model_type`` ``mistral``."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: a window that is shorter than the test prompts."""
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-05,
        "sliding_window": 24,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


ARCHITECTURES = (
    SupportedArchitecture(
        name="mistral",
        task=PipelineTask.TEXT_GENERATION,
        pipeline_model="model:MistralModel",
        example_repo_ids=("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-Nemo-Instruct-2407"),
        tiny_config=tiny_config,
    ),
    SupportedArchitecture(
        name="mistral",
        task=PipelineTask.EMBEDDINGS_GENERATION,
        pipeline_model="embedder:MistralEmbedder",
        example_repo_ids=(
            "intfloat/e5-mistral-7b-instruct",
            "Linq-AI-Research/Linq-Embed-Mistral",
        ),
        tiny_config=tiny_config,
    ),
)
