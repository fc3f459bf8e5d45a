"""Qwen 3 with experts (Yang et al. 2025, arXiv:2505.09388)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.nn import (
    FULL,
    SLIDING,
    Blueprint,
    Experts,
    FeedForward,
    Loader,
    LoadFeedForward,
    gated_mlps,
    layer_windows,
    load_experts,
    load_router,
    num_experts_per_token,
    num_layers,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class Qwen3MoeModel(TransformerModel):
    """Reads the configuration of Qwen 3 with experts and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        bias = config.flag("attention_bias")
        # This family does not read max_window_layers: the window applies to all layers or to none.
        uses_sliding_window = config.flag("use_sliding_window")
        has_window = (
            uses_sliding_window and config.optional_integer("sliding_window", _DEFAULT_WINDOW) is not None
        )
        types = (SLIDING if has_window else FULL,) * num_layers(config)
        return Blueprint.from_huggingface(
            config,
            head_norms="each",
            qkv_bias=bias,
            output_bias=bias,
            windows=layer_windows(config, types, _DEFAULT_WINDOW),
        )

    @classmethod
    def feed_forward(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig
    ) -> LoadFeedForward:
        config = huggingface_config
        num_experts = config.integer("num_local_experts", config.integer("num_experts", 128))
        inner = config.integer("moe_intermediate_size", 768)
        top_k = num_experts_per_token(config, num_experts, default=8)
        normalizes = config.flag("norm_topk_prob")
        dense_indices = dense_layers(config, blueprint.layers)
        read_dense = gated_mlps(load, blueprint)

        def read(name: str, layer: int) -> FeedForward:
            if layer in dense_indices:
                return read_dense(name, layer)
            names = blueprint.names
            return Experts(
                load_router(load, f"{name}.{names.router}", num_experts, blueprint.hidden),
                load_experts(load, f"{name}.{names.experts}", num_experts, blueprint.hidden, inner),
                top_k,
                "all_normed" if normalizes else "all",
                blueprint.activation,
            )

        return read


def dense_layers(config: HuggingFaceConfig, layers: int) -> set[int]:
    """Return the indices of layers without experts, from ``mlp_only_layers`` and ``decoder_sparse_step``."""
    listed_layers = config.integers("mlp_only_layers") or ()
    interval = config.integer("decoder_sparse_step", 1)
    return {layer for layer in range(layers) if layer in listed_layers or (layer + 1) % interval}


_DEFAULT_WINDOW = 4096
