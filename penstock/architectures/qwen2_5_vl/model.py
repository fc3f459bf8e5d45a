"""Qwen2.5-VL (Bai et al. 2025, arXiv:2502.13923): Qwen 2 with images of any size and multimodal RoPE."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from penstock.architectures.multimodal_rope import MultimodalRopeModel, rope_sections, sectioned_axes
from penstock.architectures.qwen2.model import Qwen2Model
from penstock.architectures.qwen2_5_vl.vision import Qwen25Vision
from penstock.architectures.transformer import TransformerModel
from penstock.architectures.vision_language import VisionLanguageModel
from penstock.config import HuggingFaceConfig
from penstock.errors import ConfigError
from penstock.nn import Blueprint, Loader, rope_values

if TYPE_CHECKING:
    from penstock.pipelines.core import ImageMetadata

_PREFIX = re.compile(r"^model\.(language_model\.|(?=visual\.))")


def model_tensor_name(name: str) -> str:
    """Return the name that the model uses for a checkpoint tensor."""
    return _PREFIX.sub(lambda match: "model." if match[1] else "", name)


class QwenVisionModel(MultimodalRopeModel, VisionLanguageModel):
    """The base class of Qwen's vision models: grids of patches, and positions with three axes."""

    weights_adapter = model_tensor_name
    text_family: ClassVar[type[TransformerModel]]
    """Reads the configuration of the decoder's family and builds its network."""
    sections: ClassVar[tuple[int, int, int]]
    """The default number of dim pairs for each position axis."""

    @classmethod
    def axes(cls, sections: Sequence[int], num_pairs: int) -> tuple[int, ...]:
        """Return, for each pair of dims of a head, the position axis that rotates it."""
        return sectioned_axes(sections, num_pairs)

    @classmethod
    def text_model(cls, text_config: HuggingFaceConfig) -> type[TransformerModel]:
        return cls.text_family

    @classmethod
    def text_config(cls, huggingface_config: HuggingFaceConfig) -> HuggingFaceConfig:
        config = huggingface_config
        model_type = config.text("model_type")
        if "text_config" in config:
            text_type = config.section("text_config").text("model_type", f"{model_type}_text")
            if text_type not in (model_type, f"{model_type}_text"):
                raise ConfigError("text_config.model_type", f"must be {model_type}_text, was {text_type!r}")
            values = super().text_config(config).to_dict()
        else:  # In older files, the keys of the decoder are at the top level.
            values = config.to_dict()
            del values["vision_config"]
        rope = rope_values(HuggingFaceConfig(values))
        values.pop("rope_scaling", None)
        # In older files, ``mrope`` is the name of rope type ``default``.
        if "mrope" in (rope.get("type"), rope.get("rope_type")):
            rope = {**rope, "rope_type": "default"}
        return HuggingFaceConfig({**values, "rope_parameters": rope}, "config.json: text_config")

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        text = cls.text_config(huggingface_config)
        blueprint = cls.text_family.blueprint(text)
        (rotary,) = blueprint.rotaries
        sections = rope_sections(text.section("rope_parameters"), cls.sections)
        return replace(blueprint, rotaries=(replace(rotary, axes=cls.axes(sections, rotary.dim // 2)),))

    @classmethod
    def max_image_rows(cls, huggingface_config: HuggingFaceConfig) -> int:
        return cls.max_encoder_rows

    def encoder_rows(self, image: ImageMetadata) -> int:
        return len(image.pixel_values)


class Qwen25VisionModel(QwenVisionModel):
    """Reads the configuration of Qwen2.5-VL and builds its network."""

    text_family = Qwen2Model
    sections = (16, 24, 24)
    vision_defaults: ClassVar[Mapping[str, object]] = {
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "out_hidden_size": 3584,
    }

    @classmethod
    def load_encoder(cls, load: Loader, huggingface_config: HuggingFaceConfig) -> Qwen25Vision:
        hidden = cls.blueprint(huggingface_config).hidden
        return Qwen25Vision.load(load, "visual", cls.vision_config(huggingface_config), hidden)
