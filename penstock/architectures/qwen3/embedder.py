"""Qwen 3 as an embedder or a reranker (Zhang et al. 2025, arXiv:2506.05176)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.embedder import EmbedderModel
from penstock.architectures.encoder import has_head
from penstock.architectures.qwen3.model import Qwen3Model
from penstock.nn import ClassificationHead, DecoderTrunk, Loader

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class Qwen3Embedder(EmbedderModel):
    """Qwen 3 as an embedder or a reranker.

    A reranker answers a question about a query and a document with the token "yes" or "no". The score is the
    softmax of the two logits at the last position. That is the sigmoid of their difference, and the
    difference is the product with one vector: the head's row of "yes" minus that of "no".
    """

    decoder = Qwen3Model

    @classmethod
    def classifier(
        cls, load: Loader, huggingface_config: HuggingFaceConfig, trunk: DecoderTrunk
    ) -> ClassificationHead | None:
        answers = huggingface_config.integers("reranker_answer_ids")
        if answers is None or not has_head(huggingface_config, "ForCausalLM"):
            return super().classifier(load, huggingface_config, trunk)
        table = trunk.embedding.table
        if "lm_head.weight" in load.source:
            table = load.source.tensor("lm_head.weight", tuple(table.shape))
        no, yes = (table[token].float() for token in answers)
        return ClassificationHead(load.pack((yes - no)[None], {"score": 1}, plain=True))
