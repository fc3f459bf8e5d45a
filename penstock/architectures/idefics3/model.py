"""Idefics3 (Laurençon et al. 2024, arXiv:2408.12637): Llama with images that are split into tiles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from penstock.architectures.idefics3.vision import Idefics3Vision, num_patches
from penstock.architectures.vision_language import VisionLanguageModel
from penstock.nn.vision import VisionSizes

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig
    from penstock.nn import Loader
    from penstock.pipelines.core import ImageMetadata

_PREFIX = re.compile(r"^model\.(text_model\.|(?=vision_model\.|connector\.))")


def model_tensor_name(name: str) -> str:
    """Return the name that the model uses for a checkpoint tensor."""
    return _PREFIX.sub(lambda match: "model." if match[1] else "", name)


class Idefics3Model(VisionLanguageModel):
    """Reads the configuration of Idefics3 and builds its network."""

    weights_adapter = model_tensor_name
    text_defaults: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "llama": {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
        }
    }
    vision_defaults: ClassVar[Mapping[str, object]] = {
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 32,
    }
    vision_tables = ("vision_model.embeddings.position_embedding.weight",)

    @classmethod
    def vision_sizes(cls, huggingface_config: HuggingFaceConfig) -> VisionSizes:
        """Return the sizes of the vision tower."""
        vision = cls.vision_config(huggingface_config)
        return VisionSizes.from_huggingface(vision, activation="gelu_pytorch_tanh", norm_eps=1e-6)

    @classmethod
    def load_encoder(cls, load: Loader, huggingface_config: HuggingFaceConfig) -> Idefics3Vision:
        hidden = cls.blueprint(huggingface_config).hidden
        return Idefics3Vision.load(load, huggingface_config, cls.vision_sizes(huggingface_config), hidden)

    @classmethod
    def max_image_rows(cls, huggingface_config: HuggingFaceConfig) -> int:
        # The rows of one tile, because the tiles of an image are encoded in several calls.
        return cls.vision_sizes(huggingface_config).patches_per_side ** 2

    def encoder_rows(self, image: ImageMetadata) -> int:
        return num_patches(image, self.vision_sizes(self.huggingface_config).patch_size)
