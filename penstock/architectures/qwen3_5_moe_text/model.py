"""The text model of Qwen3.5 with experts: a router, and a shared expert with a gate."""

from __future__ import annotations

from penstock.architectures.hybrid import HybridModel
from penstock.architectures.qwen2_moe.model import gated_shared_experts
from penstock.architectures.qwen3_5_text.model import hybrid_blueprint
from penstock.architectures.qwen3_next.model import HYBRID_MOE_NAMES
from penstock.config import HuggingFaceConfig
from penstock.nn import Blueprint, Loader, LoadFeedForward


class Qwen35MoeTextModel(HybridModel):
    """Reads the configuration of Qwen3.5 with experts and builds its text network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        # The file has no intermediate_size, because no layer is dense.
        values = {"intermediate_size": 1, **huggingface_config.to_dict()}
        return hybrid_blueprint(HuggingFaceConfig(values), HYBRID_MOE_NAMES)

    @classmethod
    def feed_forward(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig
    ) -> LoadFeedForward:
        return gated_shared_experts(
            load,
            blueprint,
            huggingface_config,
            num_experts=256,
            top_k=8,
            inner=512,
            shared_inner=512,
            normalizes=True,
        )
