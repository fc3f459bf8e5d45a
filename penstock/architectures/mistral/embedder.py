"""Mistral as an embedder, or with a classification head."""

from __future__ import annotations

from penstock.architectures.embedder import EmbedderModel
from penstock.architectures.mistral.model import MistralModel


class MistralEmbedder(EmbedderModel):
    """Mistral as an embedder."""

    decoder = MistralModel
