"""Qwen 3 (Yang et al. 2025, arXiv:2505.09388): norms of each head's queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.qwen2.model import upper_layer_windows
from penstock.architectures.transformer import TransformerModel
from penstock.nn import Blueprint

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class Qwen3Model(TransformerModel):
    """Reads the configuration of Qwen 3 and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        attention_bias = huggingface_config.flag("attention_bias")
        return Blueprint.from_huggingface(
            huggingface_config,
            default_head_dim=128,
            head_norms="each",
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            windows=upper_layer_windows(huggingface_config),
        )
