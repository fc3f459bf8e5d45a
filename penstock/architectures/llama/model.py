"""Llama (Touvron et al. 2023, arXiv:2302.13971), the default network of a `Blueprint`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.nn import Blueprint

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class LlamaModel(TransformerModel):
    """Reads the configuration of Llama and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        attention_bias = huggingface_config.flag("attention_bias")
        return Blueprint.from_huggingface(
            huggingface_config,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=huggingface_config.flag("mlp_bias"),
        )
