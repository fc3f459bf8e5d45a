"""Gemma (Gemma Team 2024, arXiv:2403.08295): Llama with GeGLU, scaled embeddings, norm weights 1 + w."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.nn import Blueprint

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class GemmaModel(TransformerModel):
    """Reads the configuration of Gemma and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        if config.flag("use_bidirectional_attention"):
            raise ConfigError(
                "use_bidirectional_attention", "is true, but text generation needs causal attention"
            )
        # In the earliest checkpoints, ``gelu`` means the tanh approximation of GELU.
        means_tanh = config.get("hidden_act") in (None, "gelu")
        attention_bias = config.flag("attention_bias")
        return Blueprint.from_huggingface(
            config,
            default_head_dim=256,
            activation_key=None if means_tanh else "hidden_act",
            default_activation="gelu_pytorch_tanh",
            default_tied_head=True,
            norm_offset=1.0,
            embedding_scale=config.integer("hidden_size") ** 0.5,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
        )
