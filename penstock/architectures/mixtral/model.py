"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with experts instead of feed-forward layers."""

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
    num_experts_per_token,
    num_layers,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class MixtralModel(TransformerModel):
    """Reads the configuration of Mixtral and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        layers = num_layers(huggingface_config)
        return Blueprint.from_huggingface(
            huggingface_config,
            default_rope_theta=1e6,
            norm_eps=huggingface_config.number("rms_norm_eps", 1e-5),
            windows=(huggingface_config.optional_integer("sliding_window"),) * layers,
        )

    @classmethod
    def feed_forward(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig
    ) -> LoadFeedForward:
        num_experts = huggingface_config.integer(
            "num_local_experts", huggingface_config.integer("num_experts", 8)
        )
        top_k = num_experts_per_token(huggingface_config, num_experts, default=2)

        def read(name: str, layer: int) -> Experts:
            names = blueprint.names
            if f"{name}.{names.router}.weight" not in load.source:  # older files use the name below
                name = name.removesuffix(names.feed_forward) + "block_sparse_moe"
            return Experts(
                load_router(load, f"{name}.{names.router}", num_experts, blueprint.hidden),
                load_experts(
                    load,
                    f"{name}.{names.experts}",
                    num_experts,
                    blueprint.hidden,
                    blueprint.inner,
                    ("w1", "w3", "w2"),
                ),
                top_k,
                "all_normed",
                blueprint.activation,
            )

        return read
