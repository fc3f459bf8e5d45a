"""Dense ERNIE 4.5 models."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: interleaved RoPE, a head size other than hidden / heads."""
    return {
        "architectures": ["Ernie4_5ForCausalLM"],
        "model_type": "ernie4_5",
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "head_dim": 16,
        "use_bias": False,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "pad_token_id": 0,
        "eos_token_id": 0,
    }


ARCHITECTURE = SupportedArchitecture(
    name="ernie4_5",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Ernie45Model",
    example_repo_ids=("baidu/ERNIE-4.5-0.3B-PT",),
    tiny_config=tiny_config,
)
