"""GLM-4 (Team GLM 2024, arXiv:2406.12793): Llama with interleaved RoPE in half of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from penstock.architectures.transformer import TransformerModel
from penstock.nn import Blueprint, TensorNames, interleaved

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class GlmModel(TransformerModel):
    """Reads the configuration of GLM and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        return glm_blueprint(huggingface_config, TensorNames(gate_up=("gate_up_proj",)))


def glm_blueprint(
    config: HuggingFaceConfig, names: TensorNames, block_norms: Literal["before", "around"] = "before"
) -> Blueprint:
    """Return the blueprint of a GLM family with the given tensor names and norm positions."""
    return interleaved(
        Blueprint.from_huggingface(
            config,
            default_head_dim=128,
            default_partial_rotary_factor=0.5,
            norm_eps=config.number("rms_norm_eps", 1.5625e-07),
            qkv_bias=config.flag("attention_bias", True),
            block_norms=block_norms,
            names=names,
        )
    )
