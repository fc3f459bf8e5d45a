"""The text model of Qwen3.5: layers with the gated delta rule and layers with gated full attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.hybrid import CONVOLUTION_SUFFIX, GATE_SUFFIXES, HybridModel
from penstock.nn import Blueprint, TensorNames, num_layers

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class Qwen35TextModel(HybridModel):
    """Reads the configuration of Qwen3.5 and builds its text network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        return hybrid_blueprint(
            huggingface_config, TensorNames(other_tables=(CONVOLUTION_SUFFIX,), unquantized=GATE_SUFFIXES)
        )


def hybrid_blueprint(config: HuggingFaceConfig, names: TensorNames) -> Blueprint:
    """Return the blueprint of Qwen3.5 and Qwen3-Next: norm weights ``1 + w`` and partial RoPE."""
    bias = config.flag("attention_bias")
    return Blueprint.from_huggingface(
        config,
        default_head_dim=256,
        head_norms="each",
        norm_offset=1.0,
        default_partial_rotary_factor=0.25,
        qkv_bias=bias,
        output_bias=bias,
        windows=(None,) * num_layers(config),
        names=names,
    )
