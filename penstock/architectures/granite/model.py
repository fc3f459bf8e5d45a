"""Granite: Llama with four multipliers (Yang et al. 2022, arXiv:2203.03466)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.nn import Blueprint

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class GraniteModel(TransformerModel):
    """Reads the configuration of Granite and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        attention_bias = huggingface_config.flag("attention_bias")
        return Blueprint.from_huggingface(
            huggingface_config,
            attention_scale=huggingface_config.number("attention_multiplier", 1.0),
            embedding_scale=huggingface_config.number("embedding_multiplier", 1.0),
            residual_scale=huggingface_config.number("residual_multiplier", 1.0),
            logit_scale=1 / huggingface_config.number("logits_scaling", 1.0),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=huggingface_config.flag("mlp_bias"),
        )
