"""Jina Embeddings v3 (Sturua et al. 2024, arXiv:2409.10173): XLM-RoBERTa with RoPE.

Its task adapters are separate LoRA adapters. A user registers them like other adapters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.architectures.post_norm import PostNormModel, prefix_remover
from penstock.nn import EncoderNames, PostNormSizes, RotaryConfig

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class JinaEmbeddingsV3Model(PostNormModel):
    """Reads the configuration of Jina Embeddings v3 and builds its network."""

    weights_adapter = prefix_remover("roberta.")
    ignored_weights = ("pooler.*", "lm_head.*", "*rotary_emb.inv_freq")
    names = EncoderNames(
        positions=None,
        norm="emb_ln",
        block="encoder.layers.{layer}",
        qkv=("mixer.Wqkv",),
        output="mixer.out_proj",
        attention_norm="norm1",
        up="mlp.fc1",
        down="mlp.fc2",
        mlp_norm="norm2",
    )

    @classmethod
    def sizes(cls, config: HuggingFaceConfig) -> PostNormSizes:
        sizes = super().sizes(config)
        rotary = RotaryConfig.from_huggingface(
            config, sizes.hidden // sizes.heads, default_rope_theta=20000.0
        )
        return replace(sizes, rotary=rotary, positions=rotary.max_length)
