"""ModernBERT, and the embedders and rerankers based on it."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests."""
    return {
        "architectures": ["ModernBertModel"],
        "model_type": "modernbert",
        "hidden_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "intermediate_size": 96,
        "max_position_embeddings": 130,
        "vocab_size": 130,
        "hidden_activation": "gelu",
        "local_attention": 12,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    }


ARCHITECTURE = SupportedArchitecture(
    name="modernbert",
    task=PipelineTask.EMBEDDINGS_GENERATION,
    pipeline_model="model:ModernBertModel",
    example_repo_ids=(
        "answerdotai/ModernBERT-base",
        "Alibaba-NLP/gte-modernbert-base",
        "nomic-ai/modernbert-embed-base",
    ),
    tiny_config=tiny_config,
)
