"""Qwen3.5 with experts, for text and images."""

from __future__ import annotations

from penstock.architectures.qwen3_5.model import Qwen35VisionModel
from penstock.architectures.qwen3_5_moe_text.model import Qwen35MoeTextModel


class Qwen35MoeVisionModel(Qwen35VisionModel):
    """Reads the configuration of Qwen3.5 with experts and builds its decoder and its image encoder."""

    text_family = Qwen35MoeTextModel
