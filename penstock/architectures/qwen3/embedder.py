"""Qwen 3 as an embedder or a reranker (Zhang et al. 2025, arXiv:2506.05176)."""

from __future__ import annotations

from functools import cached_property

from penstock.architectures.embedder import EmbedderModel
from penstock.architectures.qwen3.model import Qwen3Model
from penstock.architectures.qwen3.tokenizer import answer_ids
from penstock.config.huggingface import HuggingFaceConfig
from penstock.nn import ClassificationHead, DecoderTrunk, Loader


class Qwen3Embedder(EmbedderModel):
    """Qwen 3 as an embedder or a reranker.

    A reranker answers a question about a query and a document with the token "yes" or "no". The score is the
    probability of "yes": the softmax of the two logits at the last position. This equals the sigmoid of the
    difference of the logits. The difference is the product of the hidden state and one vector: the head's row
    of "yes" minus its row of "no".
    """

    decoder = Qwen3Model

    @cached_property
    def huggingface_config(self) -> HuggingFaceConfig:
        """The checkpoint's configuration.

        The configuration of a reranker also has ``answer_ids``, the token ids of the two answers.
        """
        config = super().huggingface_config
        token_ids = answer_ids(self.pipeline_config.model.checkpoint)
        if token_ids is None:
            return config
        return HuggingFaceConfig(config.to_dict() | {"answer_ids": list(token_ids)})

    @classmethod
    def classifier(
        cls, load: Loader, huggingface_config: HuggingFaceConfig, trunk: DecoderTrunk
    ) -> ClassificationHead | None:
        token_ids = huggingface_config.integers("answer_ids")
        if token_ids is None:
            return super().classifier(load, huggingface_config, trunk)
        table = trunk.embedding.table
        if "lm_head.weight" in load.source:
            table = load.source.tensor("lm_head.weight", tuple(table.shape))
        no, yes = (table[token].float() for token in token_ids)
        return ClassificationHead(load.pack((yes - no)[None], {"score": 1}, is_unquantized=True))
