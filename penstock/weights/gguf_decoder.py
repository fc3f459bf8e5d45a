"""Converts the metadata that most families in GGUF files share to keys of ``config.json``."""

from __future__ import annotations

from math import log

from penstock.weights.gguf_keys import GGUFKeys

FULL, SLIDING = "full_attention", "sliding_attention"


def decoder_config(
    keys: GGUFKeys, *, supports_partial_rotary: bool = False, eps_key: str = "rms_norm_eps"
) -> dict[str, object]:
    """Return the ``config.json`` keys that all families except GPT-2 and Gemma 4 share.

    Args:
        keys: the metadata keys of the file.
        supports_partial_rotary: whether the family supports rotary embeddings on a part of each head.
        eps_key: the key of the norms' epsilon in ``config.json``. The metadata key is
            ``layer_norm_rms_epsilon`` for ``rms_norm_eps``, and ``layer_norm_epsilon`` otherwise.

    Raises:
        WeightsError: a key is missing or invalid, or the family does not support the rotary embedding of the
            file.
    """
    metadata_key = "layer_norm_rms_epsilon" if eps_key == "rms_norm_eps" else "layer_norm_epsilon"
    num_heads = keys.count("attention.head_count")
    return {
        "hidden_size": keys.count("embedding_length"),
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", num_heads),
        "head_dim": keys.head_dim,
        "max_position_embeddings": keys.count("context_length"),
        eps_key: keys.number(f"attention.{metadata_key}"),
        "hidden_act": "silu",
        "attention_bias": keys.has_layer_tensor("attn_q.bias"),
        "mlp_bias": keys.has_layer_tensor("ffn_up.bias"),
        **_rope(keys, supports_partial_rotary),
    }


def _rope(keys: GGUFKeys, supports_partial_rotary: bool) -> dict[str, object]:
    config: dict[str, object] = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    dims = keys.count("rope.dimension_count", keys.head_dim)
    if dims != keys.head_dim:
        if not supports_partial_rotary:
            raise keys.invalid_value("rope.dimension_count", f"must be the head size, {keys.head_dim}")
        config["partial_rotary_factor"] = dims / keys.head_dim
    factors = {key: keys.file.floats(f"rope_{name}.weight") for key, name in _FACTOR_TENSORS.items()}
    scaling_type = keys.get("rope.scaling.type") or "none"
    factor = keys.number("rope.scaling.factor", 1.0)
    if scaling_type == "none" and keys.get("rope.scale_linear"):  # the key of older files
        scaling_type, factor = "linear", keys.number("rope.scale_linear")
    scaling: dict[str, object] = {}
    if factors["short_factor"] and factors["long_factor"]:
        scaling = _longrope(keys, factors["short_factor"], factors["long_factor"])
        config["original_max_position_embeddings"] = keys.count(
            "rope.scaling.original_context_length", keys.count("context_length")
        )
    elif factors["freq_factor"]:
        # The file contains one factor per pair of dims instead of the four parameters of rope type llama3.
        # This is equivalent to LongRoPE with the same factors for short and long sequences.
        scaling = _longrope(keys, factors["freq_factor"], factors["freq_factor"]) | {"attention_factor": 1.0}
        config["original_max_position_embeddings"] = keys.count("context_length")
    elif scaling_type == "linear":
        scaling = {"rope_type": "linear", "factor": factor}
    elif scaling_type == "yarn":
        scaling = _yarn(keys)
    elif scaling_type != "none":
        raise keys.invalid_value(
            "rope.scaling.type", "must be none, linear or yarn in a file without rope factor tensors"
        )
    return config | ({"rope_scaling": scaling} if scaling else {})


_FACTOR_TENSORS = {
    "freq_factor": "freqs",
    "short_factor": "factors_short",
    "long_factor": "factors_long",
}


def _longrope(keys: GGUFKeys, short: list[float], long: list[float]) -> dict[str, object]:
    scaling: dict[str, object] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    if keys.get("rope.scaling.attn_factor"):
        scaling["attention_factor"] = keys.number("rope.scaling.attn_factor")
    return scaling


def _yarn(keys: GGUFKeys) -> dict[str, object]:
    factor = keys.number("rope.scaling.factor")
    scaling: dict[str, object] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
    }
    for name in ("beta_fast", "beta_slow"):
        if keys.get(f"rope.scaling.yarn_{name}") is not None:
            scaling[name] = keys.number(f"rope.scaling.yarn_{name}")
    if keys.get("rope.scaling.attn_factor"):  # relative to the default for `factor`
        default = 0.1 * log(factor) + 1 if factor > 1 else 1.0
        scaling["attention_factor"] = keys.number("rope.scaling.attn_factor") * default
    return scaling


def layer_types(keys: GGUFKeys, period: int) -> list[str]:
    """Return the attention type of each layer.

    Every ``period``-th layer uses full attention, unless the file sets another period. Instead of a period,
    the file can have an array with one value per layer: true for sliding-window attention, false for full
    attention.
    """
    key = "attention.sliding_window_pattern"
    if keys.get(key) is None or type(keys.get(key)) is int:
        period = keys.count(key, period)
        return [SLIDING if (layer + 1) % period else FULL for layer in range(keys.count("block_count"))]
    return [SLIDING if is_sliding else FULL for is_sliding in keys.array(key)]
