"""Images in prompts of Qwen2-VL; the format is Qwen2.5-VL's."""

from __future__ import annotations

from penstock.architectures.qwen2_5_vl.media import QwenVisionFamily


class Qwen2VisionFamily(QwenVisionFamily):
    """Images of Qwen2-VL."""
