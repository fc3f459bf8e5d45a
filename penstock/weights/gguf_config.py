"""Converts the metadata of a GGUF file to ``config.json`` and ``generation_config.json``.

The keys are those of the format's specification and of each family. Settings that are not in the metadata
(biases, a tied head, factors of the rotary embedding) are derived from the tensors. Keys that require
arithmetic that the family's network does not implement are errors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from math import log
from pathlib import Path
from typing import cast

from penstock.weights.gguf import GGUFFile
from penstock.weights.gguf_keys import GGUFKeys
from penstock.weights.gguf_names import architecture_of

_log = logging.getLogger(__name__)
_FULL, _SLIDING = "full_attention", "sliding_attention"


def gguf_config(path: Path) -> dict[str, object]:
    """Return the equivalent of ``config.json`` for the model in a GGUF file.

    Raises:
        WeightsError: the file is damaged, lacks a key, or holds a model that is not supported.
        UnknownArchitectureError: the family is unknown.
    """
    file = GGUFFile(path)
    name = architecture_of(file)
    keys = GGUFKeys(file, name)
    keys.check_supported()
    config = _FAMILIES[name](keys)
    unread = keys.unread()
    if unread:
        _log.warning("%s: these metadata keys are ignored: %s", path, ", ".join(unread))
    return config | {
        "vocab_size": keys.rows_of("token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
    }


def gguf_generation_config(path: Path) -> dict[str, object]:
    """Return the sampling parameters that a GGUF file recommends, by their ``generation_config.json`` names.

    Raises:
        WeightsError: the file is damaged.
    """
    metadata = GGUFFile(path).metadata
    return {name: metadata[key] for key, name in _SAMPLING.items() if key in metadata}


_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def _decoder(keys: GGUFKeys, *, partial_rotary: bool = False) -> dict[str, object]:
    """Return the settings that all families except GPT-2 share.

    Args:
        keys: the file's keys.
        partial_rotary: whether the family supports rotary embeddings on a part of each head.
    """
    heads = keys.count("attention.head_count")
    return {
        "hidden_size": keys.count("embedding_length"),
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": keys.head_dim,
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": keys.has("attn_q.bias"),
        "mlp_bias": keys.has("ffn_up.bias"),
        **_rope(keys, partial_rotary),
    }


def _rope(keys: GGUFKeys, partial_rotary: bool) -> dict[str, object]:
    config: dict[str, object] = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    dims = keys.count("rope.dimension_count", keys.head_dim)
    if dims != keys.head_dim:
        if not partial_rotary:
            raise keys.fail("rope.dimension_count", f"must be the length of keys, {keys.head_dim}")
        config["partial_rotary_factor"] = dims / keys.head_dim
    factors = {which: keys.file.floats(f"rope_{name}.weight") for which, name in _FACTORS.items()}
    kind = keys.get("rope.scaling.type") or "none"
    factor = keys.number("rope.scaling.factor", 1.0)
    if kind == "none" and keys.get("rope.scale_linear"):  # the key of older files
        kind, factor = "linear", keys.number("rope.scale_linear")
    scaling: dict[str, object] = {}
    if factors["short_factor"] and factors["long_factor"]:
        scaling = _longrope(keys, factors["short_factor"], factors["long_factor"])
        config["original_max_position_embeddings"] = keys.count(
            "rope.scaling.original_context_length", keys.count("context_length")
        )
    elif factors["freq_factor"]:
        # The file holds one factor per pair of dimensions instead of Llama 3's four numbers. That equals
        # LongRoPE with the same factors for short and long contexts.
        scaling = _longrope(keys, factors["freq_factor"], factors["freq_factor"]) | {"attention_factor": 1.0}
        config["original_max_position_embeddings"] = keys.count("context_length")
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        scaling = _yarn(keys)
    elif kind != "none":
        raise keys.fail("rope.scaling.type", "must be none, linear or yarn if no tensor holds the factors")
    return config | ({"rope_scaling": scaling} if scaling else {})


_FACTORS = {
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
    if keys.get("rope.scaling.attn_factor"):  # multiplies the default that follows from `factor`
        default = 0.1 * log(factor) + 1 if factor > 1 else 1.0
        scaling["attention_factor"] = keys.number("rope.scaling.attn_factor") * default
    return scaling


def _llama(keys: GGUFKeys) -> dict[str, object]:
    """Return the configuration of Llama, of Mixtral (with experts) or of Mistral (with a window)."""
    config = _decoder(keys)
    window = keys.window()
    if keys.get("expert_count"):
        experts = {
            "num_local_experts": keys.count("expert_count"),
            "num_experts_per_tok": keys.count("expert_used_count"),
        }
        return config | experts | {"model_type": "mixtral", "sliding_window": window}
    if window is not None:
        return config | {"model_type": "mistral", "sliding_window": window}
    return config | {"model_type": "llama"}


def _granite(keys: GGUFKeys) -> dict[str, object]:
    return _decoder(keys) | {
        "model_type": "granite",
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "attention_multiplier": keys.number("attention.scale", keys.head_dim**-0.5),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _smollm3(keys: GGUFKeys) -> dict[str, object]:
    return _decoder(keys) | {"model_type": "smollm3", "no_rope_layer_interval": 4}


def _qwen2(keys: GGUFKeys) -> dict[str, object]:
    return _decoder(keys) | {"model_type": "qwen2"}


def _qwen3(keys: GGUFKeys) -> dict[str, object]:
    return _decoder(keys) | {"model_type": "qwen3"}


def _qwen3_moe(keys: GGUFKeys) -> dict[str, object]:
    return _decoder(keys) | {
        "model_type": "qwen3_moe",
        "intermediate_size": keys.count("feed_forward_length", keys.count("expert_feed_forward_length")),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "norm_topk_prob": keys.get("expert_weights_norm") is not False,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }


def _olmo2(keys: GGUFKeys) -> dict[str, object]:
    if keys.get("attention.sliding_window"):  # files of OLMo 3 also use this architecture name
        raise keys.fail("attention.sliding_window", "must be absent: OLMo 2 has no window")
    return _decoder(keys) | {"model_type": "olmo2"}


def _phi3(keys: GGUFKeys) -> dict[str, object]:
    return _decoder(keys, partial_rotary=True) | {
        "model_type": "phi3",
        "sliding_window": keys.window(),
    }


def _gemma2(keys: GGUFKeys) -> dict[str, object]:
    return _gemma(keys, layers_of_27b=46) | {
        "model_type": "gemma2",
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "layer_types": _layer_types(keys, 2),
    }


def _gemma3(keys: GGUFKeys) -> dict[str, object]:
    config = _gemma(keys, layers_of_27b=62)
    full = {"rope_theta": keys.number("rope.freq_base", 1_000_000.0)} | cast(
        "dict[str, object]", config.pop("rope_scaling", {})
    )
    return config | {
        "model_type": "gemma3_text",
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "layer_types": _layer_types(keys, 6),
        "rope_parameters": {
            _FULL: {"rope_type": "default"} | full,
            _SLIDING: {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)},
        },
    }


def _gemma(keys: GGUFKeys, layers_of_27b: int) -> dict[str, object]:
    config = _decoder(keys)
    # No key gives this value. Only the 27B models scale scores by another size than the head's.
    scalar: float = keys.head_dim
    if keys.count("block_count") == layers_of_27b:
        scalar = keys.count("embedding_length") // keys.count("attention.head_count")
    if keys.get("attention.scale"):
        scalar = keys.number("attention.scale") ** -2
    del config["hidden_act"]
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": keys.count("attention.sliding_window", 4096),
    }


def _layer_types(keys: GGUFKeys, period: int) -> list[str]:
    """Return the attention type of each layer.

    By default each ``period``-th layer uses full attention. A file may set another period, or give a list
    with one entry per layer.
    """
    key = "attention.sliding_window_pattern"
    if keys.get(key) is None or type(keys.get(key)) is int:
        period = keys.count(key, period)
        return [_SLIDING if (layer + 1) % period else _FULL for layer in range(keys.count("block_count"))]
    return [_SLIDING if slides else _FULL for slides in keys.array(key)]


def _gpt2(keys: GGUFKeys) -> dict[str, object]:
    return {
        "model_type": "gpt2",
        "n_embd": keys.count("embedding_length"),
        "n_layer": keys.count("block_count"),
        "n_head": keys.count("attention.head_count"),
        "n_inner": keys.count("feed_forward_length", 4 * keys.count("embedding_length")),
        "n_positions": keys.count("context_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


_FAMILIES: Mapping[str, Callable[[GGUFKeys], dict[str, object]]] = {
    "llama": _llama,
    "granite": _granite,
    "smollm3": _smollm3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
}


def _dtype(file: GGUFFile) -> str:
    """Return the float type of the activations, derived from the tensor type that takes the most bytes.

    For block types it is bfloat16.
    """
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        name = tensor.block_type.name
        sizes[name] = sizes.get(name, 0) + tensor.num_bytes
    largest = max(sizes, key=lambda name: sizes[name], default="")
    known = {"F32": "float32", "F64": "float32", "F16": "float16"}
    return known.get(largest, "bfloat16")
