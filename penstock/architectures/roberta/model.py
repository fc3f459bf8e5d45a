"""RoBERTa (Liu et al. 2019, arXiv:1907.11692): BERT with positions that start at the padding id + 1."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.architectures.post_norm import PostNormModel, prefix_remover
from penstock.nn import EncoderNames, PostNormSizes

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class RobertaModel(PostNormModel):
    """Reads the configuration of RoBERTa and builds its network."""

    weights_adapter = prefix_remover("roberta.")
    names = EncoderNames()
    ignored_weights: tuple[str, ...] = ("embeddings.position_ids", "pooler.*", "lm_head.*")

    @classmethod
    def sizes(cls, config: HuggingFaceConfig) -> PostNormSizes:
        padding = config.integer("pad_token_id", 1, minimum=0)
        return replace(super().sizes(config), first_position=padding + 1)
