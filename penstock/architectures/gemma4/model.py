"""Gemma 4 with images (Google DeepMind 2026)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from penstock.architectures.gemma4.media import MAX_TOKENS
from penstock.architectures.gemma4.vision import Gemma4Vision
from penstock.architectures.gemma4_text.model import Gemma4TextModel, load_network
from penstock.architectures.vision_language import VisionLanguageModel, VisionLanguageNetwork

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig, PipelineConfig
    from penstock.kv_cache import KVCacheSpec
    from penstock.nn import Loader, TensorNames
    from penstock.pipelines.core import ImageMetadata

_PREFIX = re.compile(
    r"^model\.(?:(language_model\.)|(?=vision_tower\.|embed_vision\.|audio_tower\.|embed_audio\.))"
)
_PLACEHOLDERS = {"image_token_id": 258_880, "video_token_id": 258_884, "audio_token_id": 258_881}
"""The keys of the token ids of media, and the default ids."""
_AUDIO_WEIGHTS = ("*audio_tower.*", "*embed_audio.*")


def model_tensor_name(name: str) -> str:
    """Return the name that the model uses for a checkpoint tensor."""
    return _PREFIX.sub(lambda match: "model." if match[1] else "", name)


class Gemma4Model(VisionLanguageModel):
    """Reads the configuration of Gemma 4 with images and builds its network."""

    weights_adapter = model_tensor_name
    text_defaults: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "gemma4_text": {
            "vocab_size": 262_144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
        }
    }
    vision_defaults: ClassVar[Mapping[str, object]] = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "head_dim": 64,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "position_embedding_size": 10_240,
    }
    vision_tables = ("patch_embedder.position_embedding_table",)

    @classmethod
    def tensor_names(cls, huggingface_config: HuggingFaceConfig) -> TensorNames:
        names = super().tensor_names(huggingface_config)
        return replace(names, unread=(*names.unread, *_AUDIO_WEIGHTS))

    @classmethod
    def kv_spec(cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> KVCacheSpec:
        spec = Gemma4TextModel.kv_spec(pipeline_config, cls.text_config(huggingface_config))
        return replace(
            spec, max_bidirectional_tokens=cls.min_step_tokens(pipeline_config, huggingface_config)
        )

    @classmethod
    def min_step_tokens(cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> int:
        text = cls.text_config(huggingface_config)
        if text.get("use_bidirectional_attention") == "vision":
            return MAX_TOKENS
        return super().min_step_tokens(pipeline_config, huggingface_config)

    @classmethod
    def load_encoder(cls, load: Loader, huggingface_config: HuggingFaceConfig) -> Gemma4Vision:
        hidden = cls.blueprint(huggingface_config).hidden
        return Gemma4Vision.load(load, cls.vision_config(huggingface_config), hidden)

    @classmethod
    def build(
        cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int
    ) -> VisionLanguageNetwork:
        text = load_network(
            load,
            cls.blueprint(huggingface_config),
            cls.text_config(huggingface_config),
            max_length,
            [huggingface_config.integer(key, default, minimum=0) for key, default in _PLACEHOLDERS.items()],
        )
        return VisionLanguageNetwork(text, cls.load_encoder(load, huggingface_config))

    @classmethod
    def max_image_rows(cls, huggingface_config: HuggingFaceConfig) -> int:
        return MAX_TOKENS * cls.vision_config(huggingface_config).integer("pooling_kernel_size") ** 2

    def encoder_rows(self, image: ImageMetadata) -> int:
        return len(image.pixel_values)
