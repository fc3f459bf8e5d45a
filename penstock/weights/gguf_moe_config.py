"""Converts the metadata of GGUF files of mixture-of-experts families to ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.weights.gguf_decoder import decoder_config
from penstock.weights.gguf_keys import GGUFKeys

_SOFTMAX, _SIGMOID = 1, 2
"""Values of ``expert_gating_func``."""
_MAVERICK_EXPERTS = 128
"""Number of experts of Llama 4 Maverick, by which the model is recognized.

Maverick has no norms of queries and keys. The metadata have no key for this property.
"""


def _experts(keys: GGUFKeys) -> dict[str, object]:
    """Return the entries of ``config.json`` for the number of experts and the number of experts per token."""
    return {
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
    }


def _check_gating(keys: GGUFKeys, function: int) -> None:
    if keys.get("expert_gating_func") not in (None, function):
        raise keys.invalid_value("expert_gating_func", f"must be {function} in this family")


def _qwen2_moe(keys: GGUFKeys) -> dict[str, object]:
    expert_intermediate_size = keys.count("expert_feed_forward_length")
    return (
        decoder_config(keys)
        | _experts(keys)
        | {
            "model_type": "qwen2_moe",
            "moe_intermediate_size": expert_intermediate_size,
            "shared_expert_intermediate_size": keys.count(
                "expert_shared_feed_forward_length", expert_intermediate_size
            ),
            "norm_topk_prob": keys.get("expert_weights_norm") is True,
            "qkv_bias": keys.has_layer_tensor("attn_q.bias"),
        }
    )


def _olmoe(keys: GGUFKeys) -> dict[str, object]:
    normalizes = keys.get("expert_weights_norm") is True
    return decoder_config(keys) | _experts(keys) | {"model_type": "olmoe", "norm_topk_prob": normalizes}


def _granite_moe(keys: GGUFKeys) -> dict[str, object]:
    if keys.get("expert_shared_feed_forward_length"):
        raise keys.invalid_value(
            "expert_shared_feed_forward_length", "must be absent: shared experts are not supported"
        )
    return (
        decoder_config(keys)
        | _experts(keys)
        | {
            "model_type": "granitemoe",
            "embedding_multiplier": keys.number("embedding_scale", 1.0),
            "attention_multiplier": keys.number("attention.scale", keys.head_dim**-0.5),
            "residual_multiplier": keys.number("residual_scale", 1.0),
            "logits_scaling": keys.number("logit_scale", 1.0),
        }
    )


def _glm4_moe(keys: GGUFKeys) -> dict[str, object]:
    _check_gating(keys, _SIGMOID)
    num_draft_layers = keys.get("nextn_predict_layers") or 0
    num_layers = keys.count("block_count")
    if type(num_draft_layers) is not int or not 0 <= num_draft_layers < num_layers:
        raise keys.invalid_value("nextn_predict_layers", f"must be a whole number from 0 to {num_layers - 1}")
    return (
        decoder_config(keys, supports_partial_rotary=True)
        | _experts(keys)
        | {
            "model_type": "glm4_moe",
            "num_hidden_layers": num_layers - num_draft_layers,
            "num_nextn_predict_layers": num_draft_layers,
            "moe_intermediate_size": keys.count("expert_feed_forward_length"),
            "n_shared_experts": keys.count("expert_shared_count", 1),
            "first_k_dense_replace": keys.get("leading_dense_block_count") or 0,
            "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
            "norm_topk_prob": keys.get("expert_weights_norm") is not False,
            "n_group": keys.count("expert_group_count", 1),
            "topk_group": keys.count("expert_group_used_count", 1),
            "use_qk_norm": keys.has_layer_tensor("attn_q_norm.weight"),
            "partial_rotary_factor": keys.count("rope.dimension_count", keys.head_dim) / keys.head_dim,
        }
    )


def _minimax_m2(keys: GGUFKeys) -> dict[str, object]:
    _check_gating(keys, _SIGMOID)
    return (
        decoder_config(keys, supports_partial_rotary=True)
        | _experts(keys)
        | {
            "model_type": "minimax_m2",
            "intermediate_size": keys.count("expert_feed_forward_length", keys.count("feed_forward_length")),
            "rotary_dim": keys.count("rope.dimension_count", keys.head_dim),
        }
    )


def _ernie_moe(keys: GGUFKeys) -> dict[str, object]:
    _check_gating(keys, _SOFTMAX)
    config = decoder_config(keys)
    return config | {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": keys.count("expert_count"),
        "moe_k": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.get("expert_shared_count") or 0,
        "moe_layer_start_index": keys.get("leading_dense_block_count") or 0,
        "moe_layer_end_index": -1,
        "moe_layer_interval": keys.count("interleave_moe_layer_step", 1),
        "use_bias": config["attention_bias"],
    }


def _phimoe(keys: GGUFKeys) -> dict[str, object]:
    config = decoder_config(keys)
    return (
        config
        | _experts(keys)
        | {
            "model_type": "phimoe",
            "sliding_window": keys.sliding_window(),
            "attention_bias": keys.has_layer_tensor("attn_q.bias"),
            "lm_head_bias": "output.bias" in keys.file.tensors,
        }
    )


def _llama4(keys: GGUFKeys) -> dict[str, object]:
    return (
        decoder_config(keys)
        | _experts(keys)
        | {
            "model_type": "llama4_text",
            "intermediate_size": keys.count("expert_feed_forward_length"),
            "intermediate_size_mlp": keys.count("feed_forward_length"),
            "interleave_moe_layer_step": keys.count("interleave_moe_layer_step", 1),
            "attention_chunk_size": 8192,
            "floor_scale": keys.count("attention.temperature_length", 8192),
            "attn_scale": keys.number("attention.temperature_scale", 0.1),
            "use_qk_norm": keys.count("expert_count") != _MAVERICK_EXPERTS,
        }
    )


MOE_CONFIGS: Mapping[str, Callable[[GGUFKeys], dict[str, object]]] = {
    "qwen2moe": _qwen2_moe,
    "olmoe": _olmoe,
    "granitemoe": _granite_moe,
    "glm4moe": _glm4_moe,
    "minimax-m2": _minimax_m2,
    "ernie4_5-moe": _ernie_moe,
    "phimoe": _phimoe,
    "llama4": _llama4,
}
"""``general.architecture`` -> function that returns the content of ``config.json``."""
