"""Converts the metadata of dense families in GGUF files to ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from penstock.weights.gguf_decoder import decoder_config, layer_types
from penstock.weights.gguf_keys import GGUFKeys

_XIELU_PARAMETERS = ("alpha_p", "alpha_n", "beta", "eps")
"""The parameters of the xIELU activation of Apertus."""


def _gemma(keys: GGUFKeys) -> dict[str, object]:
    return decoder_config(keys) | {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}


def _glm(model_type: str) -> Callable[[GGUFKeys], dict[str, object]]:
    def config(keys: GGUFKeys) -> dict[str, object]:
        values = {"partial_rotary_factor": 1.0} | decoder_config(keys, supports_partial_rotary=True)
        return values | {"model_type": model_type}

    return config


def _ernie(keys: GGUFKeys) -> dict[str, object]:
    config = decoder_config(keys)
    return config | {"model_type": "ernie4_5", "use_bias": config["attention_bias"]}


def _seed_oss(keys: GGUFKeys) -> dict[str, object]:
    output_bias = keys.has_layer_tensor("attn_output.bias")
    return decoder_config(keys) | {"model_type": "seed_oss", "attention_out_bias": output_bias}


def _exaone4(keys: GGUFKeys) -> dict[str, object]:
    config = decoder_config(keys) | {"model_type": "exaone4", "sliding_window": keys.sliding_window()}
    return config if keys.sliding_window() is None else config | {"layer_types": layer_types(keys, 4)}


def _arcee(keys: GGUFKeys) -> dict[str, object]:
    return decoder_config(keys) | {"model_type": "arcee", "hidden_act": "relu2"}


def _cohere(keys: GGUFKeys) -> dict[str, object]:
    return decoder_config(keys, eps_key="layer_norm_eps") | {
        "model_type": "cohere",
        "logit_scale": keys.number("logit_scale"),
        "use_qk_norm": keys.has_layer_tensor("attn_q_norm.weight"),
    }


def _cohere2(keys: GGUFKeys) -> dict[str, object]:
    return decoder_config(keys, eps_key="layer_norm_eps") | {
        "model_type": "cohere2",
        "logit_scale": keys.number("logit_scale"),
        "sliding_window": keys.sliding_window(),
        "layer_types": layer_types(keys, 4),
    }


def _hunyuan(keys: GGUFKeys) -> dict[str, object]:
    return decoder_config(keys) | {"model_type": "hunyuan_v1_dense"}


def _starcoder2(keys: GGUFKeys) -> dict[str, object]:
    config = decoder_config(keys, eps_key="norm_epsilon")
    return config | {
        "model_type": "starcoder2",
        "use_bias": config["attention_bias"],
        "sliding_window": keys.sliding_window(),
        "hidden_act": "gelu_pytorch_tanh",
    }


def _phi(keys: GGUFKeys) -> dict[str, object]:
    config = {"partial_rotary_factor": 1.0} | decoder_config(
        keys, supports_partial_rotary=True, eps_key="layer_norm_eps"
    )
    del config["head_dim"]
    return config | {"model_type": "phi", "hidden_act": "gelu_new"}


def _stablelm(keys: GGUFKeys) -> dict[str, object]:
    config = {"partial_rotary_factor": 1.0} | decoder_config(
        keys, supports_partial_rotary=True, eps_key="layer_norm_eps"
    )
    del config["head_dim"]
    return config | {
        "model_type": "stablelm",
        "use_qkv_bias": config["attention_bias"],
        "qk_layernorm": keys.has_layer_tensor("attn_q_norm.weight"),
        "use_parallel_residual": not keys.has_layer_tensor("ffn_norm.weight"),
    }


def _gpt_neox(keys: GGUFKeys) -> dict[str, object]:
    config = {"partial_rotary_factor": 1.0} | decoder_config(
        keys, supports_partial_rotary=True, eps_key="layer_norm_eps"
    )
    return config | {
        "model_type": "gpt_neox",
        "rotary_pct": config["partial_rotary_factor"],
        "attention_bias": keys.has_layer_tensor("attn_qkv.bias"),
        "use_parallel_residual": keys.get("use_parallel_residual") is not False,
        "hidden_act": "gelu",
    }


def _nemotron(keys: GGUFKeys) -> dict[str, object]:
    config = {"partial_rotary_factor": 1.0} | decoder_config(
        keys, supports_partial_rotary=True, eps_key="norm_eps"
    )
    return config | {"model_type": "nemotron", "hidden_act": "relu2"}


def _olmo(keys: GGUFKeys) -> dict[str, object]:
    limit = keys.number("attention.clamp_kqv") if keys.get("attention.clamp_kqv") else None
    return decoder_config(keys, eps_key="layer_norm_eps") | {"model_type": "olmo", "clip_qkv": limit}


def _ministral3(keys: GGUFKeys) -> dict[str, object]:
    config = decoder_config(keys) | {"model_type": "ministral3", "sliding_window": keys.sliding_window()}
    scaling = cast("dict[str, object]", config.pop("rope_scaling", {"rope_type": "default"}))
    if scaling["rope_type"] == "yarn" and keys.get("rope.scaling.yarn_log_multiplier"):
        multiplier = keys.number("rope.scaling.yarn_log_multiplier")
        scaling |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    if keys.get("attention.temperature_scale"):
        scaling["llama_4_scaling_beta"] = keys.number("attention.temperature_scale")
    return config | {"rope_parameters": {"rope_theta": config["rope_theta"]} | scaling}


def _apertus(keys: GGUFKeys) -> dict[str, object]:
    config = decoder_config(keys)
    if "rope_scaling" not in config:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    num_layers = keys.count("block_count")
    return config | {
        "model_type": "apertus",
        "hidden_act": "xielu",
        "xielu": {name: keys.unprefixed_numbers(f"xielu.{name}", num_layers) for name in _XIELU_PARAMETERS},
    }


DENSE_CONFIGS: Mapping[str, Callable[[GGUFKeys], dict[str, object]]] = {
    "gemma": _gemma,
    "glm4": _glm("glm4"),
    "chatglm": _glm("glm"),
    "ernie4_5": _ernie,
    "seed_oss": _seed_oss,
    "exaone4": _exaone4,
    "arcee": _arcee,
    "command-r": _cohere,
    "cohere2": _cohere2,
    "hunyuan-dense": _hunyuan,
    "starcoder2": _starcoder2,
    "phi2": _phi,
    "stablelm": _stablelm,
    "gptneox": _gpt_neox,
    "nemotron": _nemotron,
    "olmo": _olmo,
    "mistral3": _ministral3,
    "apertus": _apertus,
}
"""``general.architecture`` -> function that returns the content of ``config.json``."""
