"""The configurations of dense families in GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.weights.gguf_decoder import decoder_config, layer_types
from penstock.weights.gguf_keys import GGUFKeys


def _gemma(keys: GGUFKeys) -> dict[str, object]:
    return decoder_config(keys) | {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}


def _glm(model_type: str) -> Callable[[GGUFKeys], dict[str, object]]:
    def config(keys: GGUFKeys) -> dict[str, object]:
        values = {"partial_rotary_factor": 1.0} | decoder_config(keys, partial_rotary=True)
        return values | {"model_type": model_type}

    return config


def _ernie(keys: GGUFKeys) -> dict[str, object]:
    config = decoder_config(keys)
    return config | {"model_type": "ernie4_5", "use_bias": config["attention_bias"]}


def _seed_oss(keys: GGUFKeys) -> dict[str, object]:
    output_bias = keys.has("attn_output.bias")
    return decoder_config(keys) | {"model_type": "seed_oss", "attention_out_bias": output_bias}


def _exaone4(keys: GGUFKeys) -> dict[str, object]:
    config = decoder_config(keys) | {"model_type": "exaone4", "sliding_window": keys.window()}
    return config if keys.window() is None else config | {"layer_types": layer_types(keys, 4)}


def _arcee(keys: GGUFKeys) -> dict[str, object]:
    return decoder_config(keys) | {"model_type": "arcee", "hidden_act": "relu2"}


def _cohere(keys: GGUFKeys) -> dict[str, object]:
    return decoder_config(keys, eps="layer_norm_eps") | {
        "model_type": "cohere",
        "logit_scale": keys.number("logit_scale"),
        "use_qk_norm": keys.has("attn_q_norm.weight"),
    }


def _cohere2(keys: GGUFKeys) -> dict[str, object]:
    return decoder_config(keys, eps="layer_norm_eps") | {
        "model_type": "cohere2",
        "logit_scale": keys.number("logit_scale"),
        "sliding_window": keys.window(),
        "layer_types": layer_types(keys, 4),
    }


def _hunyuan(keys: GGUFKeys) -> dict[str, object]:
    return decoder_config(keys) | {"model_type": "hunyuan_v1_dense"}


def _starcoder2(keys: GGUFKeys) -> dict[str, object]:
    config = decoder_config(keys, eps="norm_epsilon")
    return config | {
        "model_type": "starcoder2",
        "use_bias": config["attention_bias"],
        "sliding_window": keys.window(),
        "hidden_act": "gelu_pytorch_tanh",
    }


def _phi(keys: GGUFKeys) -> dict[str, object]:
    config = {"partial_rotary_factor": 1.0} | decoder_config(keys, partial_rotary=True, eps="layer_norm_eps")
    del config["head_dim"]
    return config | {"model_type": "phi", "hidden_act": "gelu_new"}


def _stablelm(keys: GGUFKeys) -> dict[str, object]:
    config = {"partial_rotary_factor": 1.0} | decoder_config(keys, partial_rotary=True, eps="layer_norm_eps")
    del config["head_dim"]
    return config | {
        "model_type": "stablelm",
        "use_qkv_bias": config["attention_bias"],
        "qk_layernorm": keys.has("attn_q_norm.weight"),
        "use_parallel_residual": not keys.has("ffn_norm.weight"),
    }


def _gpt_neox(keys: GGUFKeys) -> dict[str, object]:
    config = {"partial_rotary_factor": 1.0} | decoder_config(keys, partial_rotary=True, eps="layer_norm_eps")
    return config | {
        "model_type": "gpt_neox",
        "rotary_pct": config["partial_rotary_factor"],
        "attention_bias": keys.has("attn_qkv.bias"),
        "use_parallel_residual": keys.get("use_parallel_residual") is not False,
        "hidden_act": "gelu",
    }


def _nemotron(keys: GGUFKeys) -> dict[str, object]:
    config = {"partial_rotary_factor": 1.0} | decoder_config(keys, partial_rotary=True, eps="norm_eps")
    return config | {"model_type": "nemotron", "hidden_act": "relu2"}


def _olmo(keys: GGUFKeys) -> dict[str, object]:
    limit = keys.number("attention.clamp_kqv") if keys.get("attention.clamp_kqv") else None
    return decoder_config(keys, eps="layer_norm_eps") | {"model_type": "olmo", "clip_qkv": limit}


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
}
"""``general.architecture`` -> function that returns the configuration."""
