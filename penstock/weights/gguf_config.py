"""Converts the metadata of a GGUF file to ``config.json`` and ``generation_config.json``.

Settings that are not in the metadata (biases, tied embeddings, factors of the rotary embedding) are derived
from the tensors. A key is an error if it requires computations that the network of the family does not
implement. Other keys of the family that are not read cause a warning, if they can affect the results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from penstock.weights.gguf import GGUFFile
from penstock.weights.gguf_decoder import FULL, SLIDING, decoder_config, layer_types
from penstock.weights.gguf_dense_config import DENSE_CONFIGS
from penstock.weights.gguf_gemma4 import gemma4_config
from penstock.weights.gguf_keys import GGUFKeys
from penstock.weights.gguf_moe_config import MOE_CONFIGS
from penstock.weights.gguf_names import read_architecture

_log = logging.getLogger(__name__)


def gguf_config(path: Path) -> dict[str, object]:
    """Return the equivalent of ``config.json`` for the model in a GGUF file.

    Raises:
        WeightsError: the file is damaged, lacks a key, or contains a model that is not supported.
        UnknownArchitectureError: the architecture is unknown.
    """
    file = GGUFFile(path)
    name = read_architecture(file)
    keys = GGUFKeys(file, name)
    config = _FAMILIES[name](keys)
    keys.check_supported()
    ignored_keys = keys.unread_keys()
    if ignored_keys:
        _log.warning("%s: these metadata keys are ignored: %s", path, ", ".join(ignored_keys))
    return config | {
        "vocab_size": keys.num_rows("token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
    }


def gguf_generation_config(path: Path) -> dict[str, object]:
    """Return the sampling parameters of a GGUF file, with the key names of ``generation_config.json``.

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


def _llama(keys: GGUFKeys) -> dict[str, object]:
    """Return the configuration of Mixtral (with experts), Mistral (with a sliding window), or Llama."""
    config = decoder_config(keys)
    window = keys.sliding_window()
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
    return decoder_config(keys) | {
        "model_type": "granite",
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "attention_multiplier": keys.number("attention.scale", keys.head_dim**-0.5),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _smollm3(keys: GGUFKeys) -> dict[str, object]:
    return decoder_config(keys) | {"model_type": "smollm3", "no_rope_layer_interval": 4}


def _qwen2(keys: GGUFKeys) -> dict[str, object]:
    return decoder_config(keys) | {"model_type": "qwen2"}


def _qwen3(keys: GGUFKeys) -> dict[str, object]:
    return decoder_config(keys) | {"model_type": "qwen3"}


def _qwen3_moe(keys: GGUFKeys) -> dict[str, object]:
    return decoder_config(keys) | {
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
    config = decoder_config(keys)
    if not keys.sliding_window():
        return config | {"model_type": "olmo2"}
    # OLMo 3: rope scaling applies only to layers without a sliding window.
    base = {"rope_theta": keys.number("rope.freq_base", 500_000.0)}
    scaling = cast("dict[str, object]", config.pop("rope_scaling", {"rope_type": "default"}))
    return config | {
        "model_type": "olmo3",
        "sliding_window": keys.sliding_window(),
        "layer_types": layer_types(keys, 4),
        "rope_parameters": {FULL: base | scaling, SLIDING: base | {"rope_type": "default"}},
    }


def _phi3(keys: GGUFKeys) -> dict[str, object]:
    return decoder_config(keys, supports_partial_rotary=True) | {
        "model_type": "phi3",
        "sliding_window": keys.sliding_window(),
    }


def _gemma2(keys: GGUFKeys) -> dict[str, object]:
    return _gemma2_or_3(keys, num_layers_27b=46) | {
        "model_type": "gemma2",
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "layer_types": layer_types(keys, 2),
    }


def _gemma3(keys: GGUFKeys) -> dict[str, object]:
    config = _gemma2_or_3(keys, num_layers_27b=62)
    full = {"rope_theta": keys.number("rope.freq_base", 1_000_000.0)} | cast(
        "dict[str, object]", config.pop("rope_scaling", {})
    )
    return config | {
        "model_type": "gemma3_text",
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "layer_types": layer_types(keys, 6),
        "rope_parameters": {
            FULL: {"rope_type": "default"} | full,
            SLIDING: {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)},
        },
    }


def _gemma2_or_3(keys: GGUFKeys, num_layers_27b: int) -> dict[str, object]:
    config = decoder_config(keys)
    # query_pre_attn_scalar has no key of its own. It is attention.scale ** -2 if the file has this key.
    # Otherwise it is the head size, or in the 27B models the hidden size divided by the number of heads.
    scalar: float = keys.head_dim
    if keys.count("block_count") == num_layers_27b:
        scalar = keys.count("embedding_length") // keys.count("attention.head_count")
    if keys.get("attention.scale"):
        scalar = keys.number("attention.scale") ** -2
    del config["hidden_act"]
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": keys.count("attention.sliding_window", 4096),
    }


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
    "gemma4": gemma4_config,
    "gpt2": _gpt2,
    **DENSE_CONFIGS,
    **MOE_CONFIGS,
}


def _dtype(file: GGUFFile) -> str:
    """Return the type of the activations, by the tensor type that takes the most bytes.

    It is float32 for F32 and F64, float16 for F16, and bfloat16 for all other types.
    """
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        name = tensor.block_type.name
        sizes[name] = sizes.get(name, 0) + tensor.num_bytes
    largest = max(sizes, key=lambda name: sizes[name], default="")
    float_types = {"F32": "float32", "F64": "float32", "F16": "float16"}
    return float_types.get(largest, "bfloat16")
