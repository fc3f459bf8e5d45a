"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama with sliding windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.nn import Blueprint, uniform_windows

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class MistralModel(TransformerModel):
    """Reads the configuration of Mistral and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        windows = uniform_windows(huggingface_config, default=4096)
        return Blueprint.from_huggingface(huggingface_config, windows=windows)
