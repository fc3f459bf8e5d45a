"""Gemma 2."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: soft caps small enough to change scores and logits."""
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
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
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 3.0,
        "rope_theta": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


ARCHITECTURE = SupportedArchitecture(
    name="gemma2",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Gemma2Model",
    example_repo_ids=("google/gemma-2-2b-it",),
    tiny_config=tiny_config,
)
