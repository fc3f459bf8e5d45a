"""Granite with experts (IBM 2024): the multipliers of Granite, and a softmax over selected experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.nn import (
    Blueprint,
    Experts,
    Loader,
    LoadFeedForward,
    TensorNames,
    load_experts,
    load_router,
    load_stacked_experts,
    num_experts_per_token,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class GraniteMoeModel(TransformerModel):
    """Reads the configuration of Granite with experts and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        bias = config.flag("attention_bias")
        return Blueprint.from_huggingface(
            config,
            attention_scale=config.number("attention_multiplier", 1.0),
            embedding_scale=config.number("embedding_multiplier", 1.0),
            residual_scale=config.number("residual_multiplier", 1.0),
            logit_scale=1 / config.number("logits_scaling", 1.0),
            qkv_bias=bias,
            output_bias=bias,
            names=_NAMES,
        )

    @classmethod
    def feed_forward(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig
    ) -> LoadFeedForward:
        hidden, inner = blueprint.hidden, blueprint.inner
        num_experts = huggingface_config.integer("num_local_experts", 8)
        top_k = num_experts_per_token(huggingface_config, num_experts, default=2)

        def read(name: str, layer: int) -> Experts:
            names = f"{name}.input_linear.weight", f"{name}.output_linear.weight"
            if names[0] in load.source:
                packed = load_stacked_experts(load, names, num_experts, hidden, inner)
            else:  # GGUF files: one tensor per expert
                packed = load_experts(load, f"{name}.{_NAMES.experts}", num_experts, hidden, inner)
            return Experts(
                load_router(load, f"{name}.{_NAMES.router}", num_experts, hidden),
                packed,
                top_k,
                "chosen",
                blueprint.activation,
            )

        return read


_NAMES = TensorNames(feed_forward="block_sparse_moe", router="router.layer")
