"""EmbeddingGemma 2 for text inputs."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.architectures.embedding_gemma2_text.model import EmbeddingGemma2TextModel
from penstock.config.huggingface import HuggingFaceConfig

_PLACEHOLDERS = {
    "image_token_id": ("image", 258_880),
    "video_token_id": ("video", 258_884),
    "audio_token_id": ("audio", 258_881),
}
"""For each key of a placeholder token id: the kind of input that the token represents, and the default id."""


def remove_text_prefix(name: str) -> str:
    """Return a tensor name without the prefixes ``model.`` and ``language_model.``."""
    return name.removeprefix("model.").removeprefix("language_model.")


class EmbeddingGemma2Model(EmbeddingGemma2TextModel):
    """Builds the text network of EmbeddingGemma 2. Its image and audio encoders are not loaded."""

    weights_adapter = remove_text_prefix
    ignored_weights = ("vision_tower.*", "embed_vision.*", "audio_tower.*", "embed_audio.*")

    @classmethod
    def text_config(cls, config: HuggingFaceConfig) -> HuggingFaceConfig:
        return HuggingFaceConfig(config.section("text_config").to_dict(), "config.json: text_config")

    @property
    def placeholders(self) -> Mapping[int, str]:
        config = self.huggingface_config
        token_ids = {
            kind: config.optional_integer(key, default_id, minimum=0)
            for key, (kind, default_id) in _PLACEHOLDERS.items()
        }
        return {token_id: kind for kind, token_id in token_ids.items() if token_id is not None}
