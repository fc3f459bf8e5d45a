"""DistilBERT, and the embedders and classifiers based on it."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests."""
    return {
        "architectures": ["DistilBertModel"],
        "model_type": "distilbert",
        "dim": 48,
        "n_layers": 3,
        "n_heads": 3,
        "hidden_dim": 96,
        "max_position_embeddings": 128,
        "vocab_size": 130,
        "activation": "gelu",
        "pad_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="distilbert",
    task=PipelineTask.EMBEDDINGS_GENERATION,
    pipeline_model="model:DistilBertModel",
    example_repo_ids=(
        "sentence-transformers/msmarco-distilbert-base-v4",
        "distilbert/distilbert-base-uncased-finetuned-sst-2-english",
    ),
    tiny_config=tiny_config,
)
