"""Gemma 3 text models: 270M, 1B, and the language models of the larger sizes."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: full and sliding attention with separate RoPE bases."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-05,
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "rope_theta": 5000.0,
        "rope_local_base_freq": 100.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
    }


ARCHITECTURES = (
    SupportedArchitecture(
        name="gemma3_text",
        task=PipelineTask.TEXT_GENERATION,
        pipeline_model="model:Gemma3TextModel",
        example_repo_ids=("google/gemma-3-1b-it", "google/gemma-3-270m-it"),
        tiny_config=tiny_config,
    ),
    SupportedArchitecture(
        name="gemma3_text",
        task=PipelineTask.EMBEDDINGS_GENERATION,
        pipeline_model="embedder:Gemma3TextEmbedder",
        example_repo_ids=("google/embeddinggemma-300m",),
        tiny_config=tiny_config,
    ),
)
