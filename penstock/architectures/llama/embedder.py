"""Llama as an embedder, or with a classification head."""

from __future__ import annotations

from penstock.architectures.embedder import EmbedderModel
from penstock.architectures.llama.model import LlamaModel


class LlamaEmbedder(EmbedderModel):
    """Llama as an embedder."""

    decoder = LlamaModel
