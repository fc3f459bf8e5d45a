"""Nemotron-4 (Parmar et al. 2024, arXiv:2402.16819): layer norm weights 1 + w, squared ReLU, ungated MLPs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.nn import BlockParts, Blueprint, Loader, attentions, layer_norms, plain_mlps

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class NemotronModel(TransformerModel):
    """Reads the configuration of Nemotron and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        attention_bias = config.flag("attention_bias")
        return Blueprint.from_huggingface(
            config,
            default_head_dim=None if "head_dim" in config else 128,
            default_activation="relu2",
            default_partial_rotary_factor=0.5,
            norm_eps=config.number("norm_eps", 1e-5),
            norm_offset=1.0,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=config.flag("mlp_bias"),
        )

    @classmethod
    def parts(cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig) -> BlockParts:
        return BlockParts(
            attentions(load, blueprint), plain_mlps(load, blueprint), layer_norms(load, blueprint)
        )
