"""How Qwen2-VL puts images into prompts: as Qwen2.5-VL does."""

from __future__ import annotations

from penstock.architectures.qwen2_5_vl.media import QwenVisionFamily


class Qwen2VisionFamily(QwenVisionFamily):
    """Images of Qwen2-VL."""
