"""How Qwen3-VL puts images into prompts: as Qwen2.5-VL does."""

from __future__ import annotations

from penstock.architectures.qwen2_5_vl.media import QwenVisionFamily


class Qwen3VisionFamily(QwenVisionFamily):
    """Images of Qwen3-VL."""
