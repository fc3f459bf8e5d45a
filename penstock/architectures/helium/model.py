"""Helium (model card of kyutai/helium-1-preview-2b): Llama with interleaved RoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.nn import Blueprint, interleaved

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class HeliumModel(TransformerModel):
    """Reads the configuration of Helium and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        blueprint = Blueprint.from_huggingface(
            config,
            default_head_dim=128,
            default_rope_theta=100_000.0,
            norm_eps=config.number("rms_norm_eps", 1e-8),
            qkv_bias=config.flag("attention_bias"),
            mlp_bias=config.flag("mlp_bias"),
        )
        if blueprint.heads * blueprint.head_dim != blueprint.hidden:
            raise ConfigError(
                "head_dim",
                f"heads x head_dim must be hidden_size {blueprint.hidden}, was "
                f"{blueprint.heads} x {blueprint.head_dim}: o_proj is square in this family",
            )
        return interleaved(blueprint)
