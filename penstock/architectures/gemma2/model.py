"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118).

The family has norms before and after attention and MLP, soft caps, and by default a sliding window in every
second layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.nn import FULL, SLIDING, Blueprint, TensorNames, layer_types, layer_windows, num_layers

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class Gemma2Model(TransformerModel):
    """Reads the configuration of Gemma 2 and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        layers = range(num_layers(config))
        types = layer_types(config, tuple(FULL if layer % 2 else SLIDING for layer in layers))
        return Blueprint.from_huggingface(
            config,
            **gemma_defaults(config),
            attention_soft_cap=config.optional_number("attn_logit_softcapping", 50.0),
            logit_soft_cap=config.optional_number("final_logit_softcapping", 30.0),
            windows=layer_windows(config, types, 4096),
        )


class GemmaDefaults(TypedDict):
    """Arguments of `Blueprint.from_huggingface` that Gemma 2 and Gemma 3 share."""

    default_head_dim: int
    activation_key: str
    default_activation: str
    default_tied_head: bool
    block_norms: Literal["around"]
    norm_offset: float
    attention_scale: float
    embedding_scale: float
    qkv_bias: bool
    output_bias: bool
    names: TensorNames


def gemma_defaults(config: HuggingFaceConfig) -> GemmaDefaults:
    """Return the arguments of `Blueprint.from_huggingface` that Gemma 2 and Gemma 3 share.

    Raises:
        ConfigError: the checkpoint has bidirectional attention.
    """
    if config.flag("use_bidirectional_attention"):
        raise ConfigError(
            "use_bidirectional_attention", "is true, but text generation needs causal attention"
        )
    attention_bias = config.flag("attention_bias")
    return {
        "default_head_dim": 256,
        "activation_key": "hidden_activation",
        "default_activation": "gelu_pytorch_tanh",
        "default_tied_head": True,
        "block_norms": "around",
        "norm_offset": 1.0,
        "attention_scale": config.number("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": config.integer("hidden_size") ** 0.5,
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "names": TensorNames(norms_before=("input_layernorm", "pre_feedforward_layernorm")),
    }
