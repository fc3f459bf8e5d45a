"""Nomic BERT: nomic-embed-text v1 and v1.5."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests."""
    return {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 96,
        "max_position_embeddings": 130,
        "vocab_size": 130,
        "type_vocab_size": 2,
        "hidden_act": "silu",
        "pad_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="nomic_bert",
    task=PipelineTask.EMBEDDINGS_GENERATION,
    pipeline_model="model:NomicBertModel",
    example_repo_ids=("nomic-ai/nomic-embed-text-v1.5",),
    tiny_config=tiny_config,
)
