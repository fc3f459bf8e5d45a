"""InternLM 3 (model card of internlm/internlm3-8b-instruct): Llama with optional biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.nn import Blueprint

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class InternLM3Model(TransformerModel):
    """Reads the configuration of InternLM 3 and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        bias = config.flag("bias", config.flag("attention_bias"))
        return Blueprint.from_huggingface(
            config,
            default_head_dim=None if "head_dim" in config else 128,
            norm_eps=config.number("rms_norm_eps", 1e-5),
            qkv_bias=config.flag("qkv_bias", config.flag("attention_bias")),
            output_bias=bias,
            mlp_bias=config.flag("mlp_bias", bias),
        )
