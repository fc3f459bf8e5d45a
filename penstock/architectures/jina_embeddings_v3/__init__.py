"""Jina Embeddings v3, in the format of transformers."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests."""
    return {
        "architectures": ["JinaEmbeddingsV3Model"],
        "model_type": "jina_embeddings_v3",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 96,
        "max_position_embeddings": 130,
        "vocab_size": 130,
        "type_vocab_size": 1,
        "hidden_act": "gelu",
        "pad_token_id": 1,
    }


ARCHITECTURE = SupportedArchitecture(
    name="jina_embeddings_v3",
    task=PipelineTask.EMBEDDINGS_GENERATION,
    pipeline_model="model:JinaEmbeddingsV3Model",
    example_repo_ids=("jinaai/jina-embeddings-v3-hf",),
    tiny_config=tiny_config,
)
