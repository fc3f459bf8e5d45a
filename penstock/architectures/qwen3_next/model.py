"""Qwen3-Next: Qwen3.5's layers with experts, and projections that are stored by key head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.hybrid import CONVOLUTION_SUFFIX, GATE_SUFFIXES, HybridModel
from penstock.architectures.qwen2_moe.model import SHARED_GATE, gated_shared_experts
from penstock.architectures.qwen3_5_text.model import hybrid_blueprint
from penstock.nn import Blueprint, Loader, LoadFeedForward, TensorNames

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class Qwen3NextModel(HybridModel):
    """Reads the configuration of Qwen3-Next and builds its network."""

    is_by_key_head = True

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        return hybrid_blueprint(huggingface_config, HYBRID_MOE_NAMES)

    @classmethod
    def feed_forward(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig
    ) -> LoadFeedForward:
        return gated_shared_experts(
            load,
            blueprint,
            huggingface_config,
            num_experts=512,
            top_k=10,
            inner=512,
            shared_inner=512,
            normalizes=True,
        )


HYBRID_MOE_NAMES = TensorNames(
    other_tables=(CONVOLUTION_SUFFIX,), unquantized=(*GATE_SUFFIXES, f".{SHARED_GATE}.weight")
)
"""The tensor names of Qwen3-Next and of Qwen3.5 with experts."""
