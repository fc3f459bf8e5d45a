"""Images in prompts of SmolVLM; the format is Idefics3's."""

from __future__ import annotations

from penstock.architectures.idefics3.media import Idefics3Family


class SmolVLMFamily(Idefics3Family):
    """Images of SmolVLM."""
