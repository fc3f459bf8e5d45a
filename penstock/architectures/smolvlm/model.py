"""SmolVLM (Marafioti et al. 2025, arXiv:2504.05299): the network of Idefics3."""

from __future__ import annotations

from penstock.architectures.idefics3.model import Idefics3Model


class SmolVLMModel(Idefics3Model):
    """Reads the configuration of SmolVLM and builds its network."""
