"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with experts in place of its feed-forward layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.nn import (
    Blueprint,
    Experts,
    Loader,
    LoadFeedForward,
    load_experts,
    load_router,
    num_chosen,
    num_layers,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class MixtralModel(TransformerModel):
    """Mixtral as a pipeline model."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        layers = num_layers(huggingface_config)
        has_window = huggingface_config.get("sliding_window") is not None
        return Blueprint.from_huggingface(
            huggingface_config,
            default_base=1e6,
            norm_eps=huggingface_config.positive("rms_norm_eps", 1e-5),
            windows=(huggingface_config.count("sliding_window") if has_window else None,) * layers,
        )

    @classmethod
    def feed_forward(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig
    ) -> LoadFeedForward:
        experts = huggingface_config.count("num_local_experts", huggingface_config.count("num_experts", 8))
        top = num_chosen(huggingface_config, experts, default=2)

        def read(name: str, layer: int) -> Experts:
            older = name.removesuffix("mlp") + "block_sparse_moe"
            if f"{name}.gate.weight" not in load.source:
                name = older
            return Experts(
                load_router(load, f"{name}.gate", experts, blueprint.hidden),
                load_experts(
                    load, f"{name}.experts", experts, blueprint.hidden, blueprint.inner, ("w1", "w3", "w2")
                ),
                top,
                "all_normed",
                blueprint.activation,
            )

        return read
