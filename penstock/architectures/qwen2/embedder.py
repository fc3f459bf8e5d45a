"""Qwen2 as an embedder, or with a classification head."""

from __future__ import annotations

from penstock.architectures.embedder import EmbedderModel
from penstock.architectures.qwen2.model import Qwen2Model


class Qwen2Embedder(EmbedderModel):
    """Qwen2 as an embedder."""

    decoder = Qwen2Model
