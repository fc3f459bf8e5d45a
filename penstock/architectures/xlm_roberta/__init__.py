"""XLM-RoBERTa, and the multilingual embedders and rerankers based on it, such as BGE-M3 and E5."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests."""
    return {
        "architectures": ["XLMRobertaModel"],
        "model_type": "xlm-roberta",
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
    name="xlm-roberta",
    task=PipelineTask.EMBEDDINGS_GENERATION,
    pipeline_model="model:XLMRobertaModel",
    example_repo_ids=(
        "BAAI/bge-m3",
        "intfloat/multilingual-e5-small",
        "BAAI/bge-reranker-v2-m3",
    ),
    tiny_config=tiny_config,
)
