"""BERT, and the embedders, rerankers and classifiers based on it: MiniLM, BGE, E5, GTE, SPLADE."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests."""
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "type_vocab_size": 2,
        "vocab_size": 130,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="bert",
    task=PipelineTask.EMBEDDINGS_GENERATION,
    pipeline_model="model:BertModel",
    example_repo_ids=(
        "sentence-transformers/all-MiniLM-L6-v2",
        "BAAI/bge-small-en-v1.5",
        "cross-encoder/ms-marco-MiniLM-L6-v2",
    ),
    tiny_config=tiny_config,
)
