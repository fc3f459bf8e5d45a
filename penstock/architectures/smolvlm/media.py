"""How SmolVLM puts images into prompts: as Idefics3 does."""

from __future__ import annotations

from penstock.architectures.idefics3.media import Idefics3Family


class SmolVLMFamily(Idefics3Family):
    """Images of SmolVLM."""
