"""ERNIE 4.5 with experts: ERNIE-4.5-21B-A3B, 300B-A47B and other ``ernie4_5_moe`` models."""

from __future__ import annotations

from penstock.architectures.registry import SupportedArchitecture
from penstock.pipelines.core import PipelineTask


def tiny_config() -> dict[str, object]:
    """Return a small ``config.json`` for tests: one dense layer, then layers with experts."""
    return {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "model_type": "ernie4_5_moe",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 88,
        "moe_intermediate_size": 24,
        "moe_num_experts": 7,
        "moe_num_shared_experts": 2,
        "moe_k": 3,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "moe_layer_interval": 1,
        "use_bias": True,
        "vocab_size": 130,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


ARCHITECTURE = SupportedArchitecture(
    name="ernie4_5_moe",
    task=PipelineTask.TEXT_GENERATION,
    pipeline_model="model:Ernie45MoeModel",
    example_repo_ids=("baidu/ERNIE-4.5-21B-A3B-PT", "baidu/ERNIE-4.5-300B-A47B-PT"),
    tiny_config=tiny_config,
)
