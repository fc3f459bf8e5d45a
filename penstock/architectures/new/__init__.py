"""GTE checkpoints with ``model_type`` ``new``, which were published with custom code."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests, with the keys of gte-multilingual-base."""
    return {
        "architectures": ["NewModel"],
        "model_type": "new",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 96,
        "max_position_embeddings": 130,
        "vocab_size": 130,
        "type_vocab_size": 1,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "layer_norm_type": "layer_norm",
        "logn_attention_clip1": False,
        "logn_attention_scale": False,
        "pack_qkv": True,
        "pad_token_id": 1,
        "position_embedding_type": "rope",
        "rope_scaling": {"factor": 8.0, "type": "ntk"},
        "rope_theta": 20000,
        "unpad_inputs": False,
        "use_memory_efficient_attention": False,
    }


ARCHITECTURE = SupportedArchitecture(
    name="new",
    task=PipelineTask.EMBEDDINGS_GENERATION,
    pipeline_model="model:NewModel",
    example_repo_ids=(
        "Alibaba-NLP/gte-multilingual-base",
        "Alibaba-NLP/gte-multilingual-reranker-base",
        "Alibaba-NLP/gte-base-en-v1.5",
    ),
    tiny_config=tiny_config,
)
