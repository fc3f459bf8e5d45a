"""Seed-OSS (model card of ByteDance-Seed/Seed-OSS-36B-Instruct): Llama with biases in attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.nn import Blueprint

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class SeedOssModel(TransformerModel):
    """Reads the configuration of Seed-OSS and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        return Blueprint.from_huggingface(
            config,
            default_head_dim=None if "head_dim" in config else 128,
            qkv_bias=config.flag("attention_bias", True),
            output_bias=config.flag("attention_out_bias"),
            mlp_bias=config.flag("mlp_bias"),
        )
