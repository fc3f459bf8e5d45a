"""OLMo 2 (OLMo et al. 2025, arXiv:2501.00656): norms after attention and MLP, norms of queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.nn import Blueprint

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class Olmo2Model(TransformerModel):
    """Reads the configuration of OLMo 2 and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        attention_bias = huggingface_config.flag("attention_bias")
        return Blueprint.from_huggingface(
            huggingface_config,
            norm_eps=huggingface_config.number("rms_norm_eps", 1e-5),
            block_norms="after",
            head_norms="together",
            qkv_bias=attention_bias,
            output_bias=attention_bias,
        )
