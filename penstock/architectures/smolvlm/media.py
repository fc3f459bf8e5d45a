"""Images in prompts of SmolVLM, in the format of Idefics3."""

from __future__ import annotations

from penstock.architectures.idefics3.media import Idefics3Family


class SmolVLMFamily(Idefics3Family):
    """Images of SmolVLM."""
