"""Gemma 3 with images (Gemma Team 2025, arXiv:2503.19786)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from penstock.architectures.gemma3.vision import Gemma3Vision
from penstock.architectures.vision_language import VisionLanguageModel
from penstock.nn.vision import VisionSizes

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig, PipelineConfig
    from penstock.kv_cache import KVCacheSpec
    from penstock.nn import Loader
    from penstock.pipelines.core import ImageMetadata

_PREFIXES = (
    (re.compile(r"^(?:model\.language_model|language_model\.model)\."), "model."),
    (re.compile(r"^language_model\.lm_head\."), "lm_head."),
    (re.compile(r"^(?:model\.)?vision_tower\.(?:vision_model\.)?"), "vision_tower."),
    (re.compile(r"^model\.multi_modal_projector\."), "multi_modal_projector."),
)


def model_tensor_name(name: str) -> str:
    """Return the name that the model uses for a checkpoint tensor."""
    for pattern, prefix in _PREFIXES:
        name = pattern.sub(prefix, name)
    return name


class Gemma3Model(VisionLanguageModel):
    """Reads the configuration of Gemma 3 with images and builds its network."""

    weights_adapter = model_tensor_name
    ignored_weights = (*VisionLanguageModel.ignored_weights, "vision_tower.head.*")
    text_defaults: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "gemma3_text": {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
        }
    }
    vision_defaults: ClassVar[Mapping[str, object]] = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
    }
    vision_tables = ("embeddings.position_embedding.weight", "vision_tower.head.*", "vision_model.head.*")

    @classmethod
    def kv_spec(cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> KVCacheSpec:
        spec = super().kv_spec(pipeline_config, huggingface_config)
        return replace(
            spec, max_bidirectional_tokens=cls.min_step_tokens(pipeline_config, huggingface_config)
        )

    @classmethod
    def min_step_tokens(cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> int:
        return huggingface_config.integer("mm_tokens_per_image", 256)

    @classmethod
    def vision_sizes(cls, huggingface_config: HuggingFaceConfig) -> VisionSizes:
        """Return the sizes of the vision tower."""
        vision = cls.vision_config(huggingface_config)
        return VisionSizes.from_huggingface(vision, activation="gelu_pytorch_tanh", norm_eps=1e-6)

    @classmethod
    def load_encoder(cls, load: Loader, huggingface_config: HuggingFaceConfig) -> Gemma3Vision:
        hidden = cls.blueprint(huggingface_config).hidden
        return Gemma3Vision.load(load, huggingface_config, cls.vision_sizes(huggingface_config), hidden)

    @classmethod
    def max_image_rows(cls, huggingface_config: HuggingFaceConfig) -> int:
        return cls.vision_sizes(huggingface_config).patches_per_side ** 2

    def encoder_rows(self, image: ImageMetadata) -> int:
        return self.max_image_rows(self.huggingface_config)
