"""Images in prompts of Qwen3-VL; the format is Qwen2.5-VL's."""

from __future__ import annotations

from penstock.architectures.qwen2_5_vl.media import QwenVisionFamily


class Qwen3VisionFamily(QwenVisionFamily):
    """Images of Qwen3-VL."""
