"""Qwen2-VL (Wang et al. 2024, arXiv:2409.12191): Qwen 2 with images of any size and multimodal RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from penstock.architectures.qwen2.model import Qwen2Model
from penstock.architectures.qwen2_5_vl.model import QwenVisionModel
from penstock.architectures.qwen2_vl.vision import Qwen2Vision

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig
    from penstock.nn import Loader


class Qwen2VisionModel(QwenVisionModel):
    """Reads the configuration of Qwen2-VL and builds its network."""

    text_family = Qwen2Model
    sections = (16, 24, 24)
    vision_defaults: ClassVar[Mapping[str, object]] = {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "mlp_ratio": 4,
        "num_heads": 16,
        "patch_size": 14,
    }

    @classmethod
    def widest_layer(cls, huggingface_config: HuggingFaceConfig) -> int:
        vision = cls.vision_config(huggingface_config)
        return vision.integer("embed_dim") * max(3, vision.integer("mlp_ratio"))

    @classmethod
    def load_encoder(cls, load: Loader, huggingface_config: HuggingFaceConfig) -> Qwen2Vision:
        hidden = cls.blueprint(huggingface_config).hidden
        return Qwen2Vision.load(load, "visual", cls.vision_config(huggingface_config), hidden)
