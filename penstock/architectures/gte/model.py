"""GTE (Zhang et al. 2024, arXiv:2407.19669): BERT with a rotary embedding and gated layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.architectures.post_norm import PostNormModel, without_prefix
from penstock.nn import ClassifierNames, EncoderNames, PostNormSizes, RotaryConfig, VocabularyNames

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class GteModel(PostNormModel):
    """GTE as a pipeline model."""

    weights_adapter = without_prefix("gte.")
    ignored_weights = ("pooler.*", "lm_head.*", "*rotary_emb.inv_freq")
    names = EncoderNames(
        positions=None,
        qkv=("attention.qkv_proj",),
        output="attention.o_proj",
        attention_norm="attn_ln",
        gate="mlp.up_gate_proj",
        up="mlp.up_gate_proj",
        down="mlp.down_proj",
        mlp_norm="mlp_ln",
    )
    classifier_names = ClassifierNames(dense="pooler.dense", output="classifier")
    vocabulary_names = VocabularyNames(norm="lm_head.norm", bias="lm_head.decoder.bias")

    @classmethod
    def sizes(cls, config: HuggingFaceConfig) -> PostNormSizes:
        sizes = super().sizes(config)
        rotary = RotaryConfig.from_huggingface(config, sizes.hidden // sizes.heads, default_base=160000.0)
        return replace(sizes, rotary=rotary, positions=rotary.max_length, up_bias=False)
