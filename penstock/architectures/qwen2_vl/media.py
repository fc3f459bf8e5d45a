"""Images in prompts of Qwen2-VL, in the format of Qwen2.5-VL."""

from __future__ import annotations

from penstock.architectures.qwen2_5_vl.media import QwenVisionFamily


class Qwen2VisionFamily(QwenVisionFamily):
    """Images of Qwen2-VL."""
