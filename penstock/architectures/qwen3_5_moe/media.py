"""Images in prompts of Qwen3.5 with experts, in the format of Qwen2.5-VL."""

from __future__ import annotations

from penstock.architectures.qwen2_5_vl.media import QwenVisionFamily


class Qwen35MoeVisionFamily(QwenVisionFamily):
    """Images of Qwen3.5 with experts."""
