"""RoBERTa, and the embedders, rerankers and classifiers based on it."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests."""
    return {
        "architectures": ["RobertaModel"],
        "model_type": "roberta",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 96,
        "max_position_embeddings": 130,
        "vocab_size": 130,
        "type_vocab_size": 1,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-05,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }


ARCHITECTURE = SupportedArchitecture(
    name="roberta",
    task=PipelineTask.EMBEDDINGS_GENERATION,
    pipeline_model="model:RobertaModel",
    example_repo_ids=(
        "sentence-transformers/all-distilroberta-v1",
        "cross-encoder/stsb-roberta-base",
    ),
    tiny_config=tiny_config,
)
