"""EmbeddingGemma (Vera et al. 2025, arXiv:2509.20354): Gemma 3 with bidirectional attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.architectures.embedder import EmbedderModel
from penstock.architectures.gemma3_text.model import Gemma3TextModel
from penstock.config.huggingface import HuggingFaceConfig
from penstock.nn import Blueprint

if TYPE_CHECKING:
    pass


class Gemma3TextEmbedder(EmbedderModel):
    """Gemma 3 as an embedder, bidirectional if the configuration says so."""

    decoder = Gemma3TextModel

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        is_causal = not config.flag("use_bidirectional_attention")
        blueprint = super().blueprint(
            HuggingFaceConfig(config.to_dict() | {"use_bidirectional_attention": False})
        )
        if is_causal:
            return blueprint
        # `sliding_window` counts the keys in both directions.
        windows = tuple(size and size // 2 + 1 for size in blueprint.windows)
        return replace(blueprint, is_causal=False, windows=windows)
