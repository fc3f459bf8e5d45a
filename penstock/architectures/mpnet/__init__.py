"""MPNet, and the embedders based on it."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests."""
    return {
        "architectures": ["MPNetModel"],
        "model_type": "mpnet",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 96,
        "max_position_embeddings": 130,
        "vocab_size": 130,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-05,
        "relative_attention_num_buckets": 32,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }


ARCHITECTURE = SupportedArchitecture(
    name="mpnet",
    task=PipelineTask.EMBEDDINGS_GENERATION,
    pipeline_model="model:MPNetModel",
    example_repo_ids=(
        "sentence-transformers/all-mpnet-base-v2",
        "sentence-transformers/multi-qa-mpnet-base-dot-v1",
    ),
    tiny_config=tiny_config,
)
