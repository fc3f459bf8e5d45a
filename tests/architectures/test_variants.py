"""Variants of the configurations of decoder families: logits equal those of transformers.

Each ``config.json`` has the key names that the checkpoint's authors use. transformers saves it with the key
names of its own version. Both files must give the same logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import (
    DECODERS,
    load_in_transformers,
    make_tiny_config,
    transformers_logits,
    transformers_step,
    write_checkpoint,
)
from support.dense_variants import DENSE_VARIANTS
from support.pipeline_steps import append_token, make_context, open_pipeline, random_tokens, step_logits

pytestmark = pytest.mark.models

LONGROPE = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 2.0, 5.0, 7.5]}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA4_DENSE = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
OTHER_SIZES = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20, "hidden_size": 36}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "biases": {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
        "tied, llama3 rope": {"tie_word_embeddings": True, "rope_scaling": LLAMA3, "rope_theta": 500.0},
        "sizes": OTHER_SIZES,
    },
    "mistral": {
        "no window": {"sliding_window": None, "head_dim": 20, "rope_theta": 1e6},
        "window of 2": {"sliding_window": 2},
        "window of 16": {"sliding_window": 16, "tie_word_embeddings": True},
        "window longer than the prompts": {"sliding_window": 4096},
        "sizes": OTHER_SIZES,
    },
    "qwen2": {
        "disabled window": {"use_sliding_window": False, "sliding_window": 24, "max_window_layers": 0},
        "windows in all layers": {"max_window_layers": 0, "tie_word_embeddings": False},
        "layer types": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "yarn": {"use_sliding_window": False, "rope_scaling": YARN, "max_position_embeddings": 64},
        "sizes": {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3},
    },
    "qwen3": {
        "biases, untied": {"attention_bias": True, "tie_word_embeddings": False},
        "windows": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
        "head_dim absent": {"head_dim": "absent", "num_attention_heads": 2, "hidden_size": 24},
        "sizes": OTHER_SIZES,
    },
    "olmo2": {
        "one kv head": {"num_key_value_heads": 1, "rope_theta": 500000.0},
        "biases, tied": {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 6},
        "linear rope": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    },
    "granite": {
        "biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        "granite 3.3": {
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
            "rope_theta": 10000000.0,
        },
        "multipliers absent": dict.fromkeys(
            ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"),
            "absent",
        ),
    },
    "smollm3": {
        "published configuration": {
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0],
            "layer_types": ["full_attention"] * 4,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "max_window_layers": 28,
        },
        "windows in layers without rope": {"use_sliding_window": True, "sliding_window": 20},
        "biases, untied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
        "rope in all layers": {"no_rope_layers": [1, 1, 1, 1, 0], "rope_theta": "absent"},
    },
    "phi3": {
        "longrope under the name yarn": {
            "rope_scaling": LONGROPE | {"type": "yarn"},
            "original_max_position_embeddings": 32,
        },
        "longrope across its limit": {
            "rope_scaling": LONGROPE | {"type": "longrope"},
            "original_max_position_embeddings": 80,
            "sliding_window": 262144,
        },
        "partial longrope, tied": {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.1, 1.2, 1.4],
                "long_factor": [2.0, 3.0, 4.0],
            },
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
            "sliding_window": None,
        },
        "partial rope": {"partial_rotary_factor": 0.5, "num_key_value_heads": 6},
    },
    "gemma2": {
        "tied, no caps": {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": True,
        },
        "caps absent": {"attn_logit_softcapping": "absent", "final_logit_softcapping": "absent"},
        "layer types": {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2},
        "biases": {"attention_bias": True, "hidden_activation": "gelu", "hidden_act": "silu"},
        "published configuration": {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"},
    },
    "gemma4_text": {
        "dense, values are keys, window longer than the prompts": {
            **GEMMA4_DENSE,
            "sliding_window": 4096,
            "hidden_activation": "silu",
        },
        "experts": {
            **GEMMA4_DENSE,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 3,
            "moe_intermediate_size": 20,
        },
        "one expert of four, default layer types, no shared layers": {
            "num_experts": 4,
            "top_k_experts": 1,
            "layer_types": "absent",
            "num_kv_shared_layers": 0,
            "final_logit_softcapping": None,
        },
        "values are keys in shared layers": {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "num_kv_shared_layers": 3,
        },
        "more than ten layers": {
            "num_hidden_layers": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 6,
        },
        "last layer forced to full attention, no experts": {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2,
            "num_kv_shared_layers": 2,
            "tie_word_embeddings": False,
            "enable_moe_block": False,
            "num_experts": None,
            "top_k_experts": None,
        },
        "biases, rope factors, one cache group": {
            "attention_bias": True,
            "global_head_dim": 16,
            "sliding_window": 256,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 50.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
            },
        },
    },
    "gemma3_text": {
        "linear global rope": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        "sliding_window_pattern 3": {"sliding_window_pattern": 3, "sliding_window": 10},
        "rope bases absent": {
            "rope_theta": "absent",
            "rope_local_base_freq": "absent",
            "query_pre_attn_scalar": 16,
        },
        "caps, untied": {
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": False,
        },
        "rope_parameters": {
            "rope_theta": "absent",
            "rope_local_base_freq": "absent",
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            },
        },
        "biases": {"attention_bias": True, "num_key_value_heads": 1, "num_attention_heads": 3},
    },
    "gpt2": {
        "untied head": {"tie_word_embeddings": False, "n_inner": 50, "activation_function": "relu"},
        "scores scaled by layer index": {
            "scale_attn_by_inverse_layer_idx": True,
            "reorder_and_upcast_attn": True,
        },
        "unscaled scores": {"scale_attn_weights": False, "activation_function": "gelu"},
    },
}
VARIANTS |= DENSE_VARIANTS
CASES = [(family, name) for family, variants in VARIANTS.items() for name in variants]


def make_config(family: str, variant: dict[str, Any]) -> dict[str, Any]:
    config = make_tiny_config(family) | variant
    return {key: value for key, value in config.items() if value != "absent"}


@pytest.mark.parametrize(("family", "name"), CASES, ids=[f"{family}: {name}" for family, name in CASES])
def test_logits_equal_transformers(family: str, name: str, tmp_path: Path) -> None:
    config = make_config(family, VARIANTS[family][name])
    folder = write_checkpoint(tmp_path, config)
    tokens = random_tokens(85, 130, seed=5)
    pipeline = open_pipeline(folder, kv_cache_block_size=16)
    saved_config_logits = step_logits(pipeline, [make_context(tokens[:70])])[0]
    (folder / "config.json").write_text(json.dumps(config))
    reference = load_in_transformers(folder)
    pipeline = open_pipeline(folder, kv_cache_block_size=16)
    context = make_context(tokens[:70])
    logits = step_logits(pipeline, [context])[0]
    assert torch.equal(saved_config_logits, logits)
    expected = transformers_logits(reference, tokens[:70])
    tolerance = 1e-4 * max(1.0, float(expected.std()))
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)
    _, cache = transformers_step(reference, tokens[:70])
    # transformers decodes step by step, because some RoPE types depend on the sequence length.
    for length in range(71, 86):
        expected, cache = transformers_step(reference, tokens[:length], cache)
        append_token(pipeline, context, tokens[length - 1])
        logits = step_logits(pipeline, [context])[0][-1:]
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)


def test_variants_belong_to_known_families() -> None:
    assert set(VARIANTS) <= {architecture.name for architecture in DECODERS}
    assert all(VARIANTS.values())
