"""Arcee Foundation Models, AFM (model card of arcee-ai/AFM-4.5B): Llama with ungated feed-forward layers.

The activation is squared ReLU (So et al. 2021, arXiv:2109.08668).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.nn import Blueprint, Loader, LoadFeedForward, plain_mlps

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class ArceeModel(TransformerModel):
    """Reads the configuration of AFM and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        attention_bias = config.flag("attention_bias")
        return Blueprint.from_huggingface(
            config,
            default_activation="relu2",
            norm_eps=config.number("rms_norm_eps", 1e-5),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=config.flag("mlp_bias"),
        )

    @classmethod
    def feed_forward(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig
    ) -> LoadFeedForward:
        return plain_mlps(load, blueprint)
