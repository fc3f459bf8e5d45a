"""gpt-oss: gpt-oss-20b and gpt-oss-120b, with experts in MXFP4 or in plain floats."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: every second layer has a window."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 1500.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 32,
            "truncate": False,
        },
        "hidden_act": "silu",
        "attention_bias": True,
        "tie_word_embeddings": False,
    }


ARCHITECTURE = SupportedArchitecture(
    name="gpt_oss",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:GptOssModel",
    example_repo_ids=("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
    tiny_config=tiny_config,
)
