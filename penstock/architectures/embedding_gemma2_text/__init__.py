"""The text model of EmbeddingGemma 2."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: fewer and wider kv heads in layers without a window."""
    return {
        "architectures": ["EmbeddingGemma2TextModel"],
        "model_type": "embedding_gemma2_text",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "per_layer_config": {
            "1": {"head_dim": 16, "num_key_value_heads": 2},
            "3": {"head_dim": 16, "num_key_value_heads": 2},
        },
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "hidden_size_per_layer_input": 24,
        "embedding_dim": 40,
        "pad_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="embedding_gemma2_text",
    task=PipelineTask.EMBEDDINGS_GENERATION,
    pipeline_model="model:EmbeddingGemma2TextModel",
    tiny_config=tiny_config,
)
