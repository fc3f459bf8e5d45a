"""EmbeddingGemma (Vera et al. 2025, arXiv:2509.20354): Gemma 3 with bidirectional attention."""

from __future__ import annotations

from dataclasses import replace

from penstock.architectures.embedder import EmbedderModel
from penstock.architectures.gemma3_text.model import Gemma3TextModel
from penstock.config.huggingface import HuggingFaceConfig
from penstock.nn import Blueprint


class Gemma3TextEmbedder(EmbedderModel):
    """Gemma 3 as an embedder; attention is bidirectional if ``use_bidirectional_attention`` is set."""

    decoder = Gemma3TextModel

    @classmethod
    def is_causal(cls, huggingface_config: HuggingFaceConfig) -> bool:
        return not huggingface_config.flag("use_bidirectional_attention")

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        causal_config = HuggingFaceConfig(
            huggingface_config.to_dict() | {"use_bidirectional_attention": False}
        )
        blueprint = super().blueprint(causal_config)
        if cls.is_causal(huggingface_config):
            return blueprint
        # ``sliding_window`` counts the keys of both directions. `Attention.window` counts the query and the
        # keys of one direction.
        windows = tuple(size and size // 2 + 1 for size in blueprint.windows)
        return replace(blueprint, windows=windows)
