"""Gemma 4 in GGUF files: tensor names, and the conversion of metadata to ``config.json``."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import WeightsError
from penstock.weights.gguf_decoder import FULL, SLIDING, layer_types
from penstock.weights.gguf_family import LLAMA, POST_NORMS, GGUFFamily
from penstock.weights.gguf_keys import GGUFKeys

_BLOCK = "model.layers.N"
_NO_ROTATION = 1e20
"""A divisor of a rotary frequency that is at least this large means that the pair of dims is not rotated."""

GEMMA4_FAMILY = GGUFFamily(
    LLAMA
    | POST_NORMS
    | {
        "blk.N.ffn_norm": f"{_BLOCK}.pre_feedforward_layernorm",
        "blk.N.pre_ffw_norm_2": f"{_BLOCK}.pre_feedforward_layernorm_2",
        "blk.N.post_ffw_norm_1": f"{_BLOCK}.post_feedforward_layernorm_1",
        "blk.N.post_ffw_norm_2": f"{_BLOCK}.post_feedforward_layernorm_2",
        "blk.N.ffn_gate_inp": f"{_BLOCK}.router.proj",
        "blk.N.ffn_gate_exps": f"{_BLOCK}.experts.X.gate_proj",
        "blk.N.ffn_up_exps": f"{_BLOCK}.experts.X.up_proj",
        "blk.N.ffn_down_exps": f"{_BLOCK}.experts.X.down_proj",
        "blk.N.inp_gate": f"{_BLOCK}.per_layer_input_gate",
        "blk.N.proj": f"{_BLOCK}.per_layer_projection",
        "blk.N.post_norm": f"{_BLOCK}.post_per_layer_input_norm",
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
    vectors={
        "blk.N.layer_output_scale": (f"{_BLOCK}.layer_scalar", 1),
        "blk.N.ffn_gate_inp.scale": (f"{_BLOCK}.router.scale", 1),
        "blk.N.ffn_down_exps.scale": (f"{_BLOCK}.router.per_expert_scale", 1),
    },
    fused_experts={
        "blk.N.ffn_gate_up_exps": (f"{_BLOCK}.experts.X.gate_proj", f"{_BLOCK}.experts.X.up_proj")
    },
)


def gemma4_config(keys: GGUFKeys) -> dict[str, object]:
    """Return the content of ``config.json``.

    Raises:
        WeightsError: a key is missing or invalid, or layers have sizes that the family does not have.
    """
    types = layer_types(keys, 6)
    layers = keys.count("block_count")
    if len(types) != layers:
        raise keys.invalid_value(
            "attention.sliding_window_pattern", f"must have {layers} elements, has {len(types)}"
        )
    if keys.count("rope.dimension_count", keys.head_dim) != keys.head_dim:
        raise keys.invalid_value("rope.dimension_count", f"must be the head size, {keys.head_dim}")
    num_shared = keys.get("attention.shared_kv_layers") or 0
    if type(num_shared) is not int or not 0 <= num_shared < layers:
        raise keys.invalid_value("attention.shared_kv_layers", f"must be a whole number below {layers}")
    kv_heads = _per_layer(keys, "attention.head_count_kv", layers)
    inner_sizes = _per_layer(keys, "feed_forward_length", layers)
    wide_sizes = inner_sizes[layers - num_shared :]
    is_wide = bool(wide_sizes) and set(wide_sizes) == {2 * inner_sizes[0]}
    if set(inner_sizes[: layers - num_shared]) != {inner_sizes[0]} or not (
        is_wide or set(wide_sizes) <= {inner_sizes[0]}
    ):
        raise keys.invalid_value(
            "feed_forward_length",
            "must be equal in all layers, or twice as large in all layers that share keys and values",
        )
    sliding_head_dim = keys.count("attention.key_length_swa", 256)
    full_layer = types.index(FULL) if FULL in types else 0
    config: dict[str, object] = {
        "model_type": "gemma4_text",
        "hidden_size": keys.count("embedding_length"),
        "intermediate_size": inner_sizes[0],
        "num_hidden_layers": layers,
        "num_attention_heads": keys.count("attention.head_count"),
        "num_key_value_heads": kv_heads[0],
        "head_dim": sliding_head_dim,
        "per_layer_config": {
            str(layer): {
                "head_dim": keys.head_dim if types[layer] == FULL else sliding_head_dim,
                "num_key_value_heads": kv_heads[layer],
            }
            for layer in range(layers)
        },
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": types,
        "sliding_window": keys.count("attention.sliding_window", 512),
        "final_logit_softcapping": keys.get("final_logit_softcapping") or None,
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": is_wide,
        "attention_k_eq_v": f"blk.{full_layer}.attn_v.weight" not in keys.file.tensors,
        "hidden_size_per_layer_input": keys.get("embedding_length_per_layer_input") or 0,
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "rope_theta": keys.number("rope.freq_base", 1_000_000.0),
                "partial_rotary_factor": _rotated_fraction(keys),
            },
            SLIDING: {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)},
        },
    }
    if config["hidden_size_per_layer_input"]:
        config["vocab_size_per_layer_input"] = keys.num_rows("per_layer_token_embd.weight")
    if keys.get("expert_count"):
        config |= {
            "enable_moe_block": True,
            "num_experts": keys.count("expert_count"),
            "top_k_experts": keys.count("expert_used_count"),
            "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        }
    return config


def _per_layer(keys: GGUFKeys, key: str, layers: int) -> Sequence[int]:
    """Return the whole number of each layer from an array, or from one number for all layers."""
    if keys.get(key) is None or type(keys.get(key)) is int:
        return [keys.count(key)] * layers
    values = [value for value in keys.array(key) if type(value) is int and value > 0]
    if len(values) != layers or len(keys.array(key)) != layers:
        raise keys.invalid_value(
            key, f"must be a whole number of at least 1, or an array of {layers} of them"
        )
    return values


def _rotated_fraction(keys: GGUFKeys) -> float:
    """Return the fraction of the pairs of dims that the rotary embedding of full attention rotates.

    Raises:
        WeightsError: the divisors of the frequencies are not 1 for the first pairs and very large for the
            others.
    """
    divisors = keys.file.floats("rope_freqs.weight")
    if not divisors:
        return 1.0
    num_rotated = sum(divisor == 1 for divisor in divisors)
    is_valid = num_rotated > 0 and len(divisors) == keys.head_dim // 2
    is_valid = is_valid and all(divisor == 1 for divisor in divisors[:num_rotated])
    if not is_valid or any(divisor < _NO_ROTATION for divisor in divisors[num_rotated:]):
        raise WeightsError(
            keys.file.path,
            f"rope_freqs.weight must be {keys.head_dim // 2} numbers: ones, then values of at least "
            f"{_NO_ROTATION:g}",
        )
    return num_rotated / len(divisors)
