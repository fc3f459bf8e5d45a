"""EuroBERT, and the embedders based on it."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests."""
    return {
        "architectures": ["EuroBertModel"],
        "model_type": "eurobert",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 96,
        "max_position_embeddings": 130,
        "vocab_size": 130,
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "mask_token_id": 2,
        "tie_word_embeddings": False,
    }


ARCHITECTURE = SupportedArchitecture(
    name="eurobert",
    task=PipelineTask.EMBEDDINGS_GENERATION,
    pipeline_model="model:EuroBertModel",
    example_repo_ids=("EuroBERT/EuroBERT-210m",),
    tiny_config=tiny_config,
)
