"""Qwen 2 with experts (Yang et al. 2024, arXiv:2407.10671): a shared expert with a gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.qwen3_moe.model import dense_layers
from penstock.architectures.transformer import TransformerModel
from penstock.nn import (
    FULL,
    SLIDING,
    Blueprint,
    Experts,
    FeedForward,
    GatedMLP,
    Loader,
    LoadFeedForward,
    SharedExperts,
    TensorNames,
    gated_mlps,
    layer_types,
    layer_windows,
    load_experts,
    load_router,
    num_experts_per_token,
    num_layers,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class Qwen2MoeModel(TransformerModel):
    """The pipeline model of Qwen 2 with experts."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        return Blueprint.from_huggingface(
            huggingface_config,
            qkv_bias=huggingface_config.flag("qkv_bias", True),
            windows=_windows(huggingface_config),
            names=_NAMES,
        )

    @classmethod
    def feed_forward(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig
    ) -> LoadFeedForward:
        config, hidden = huggingface_config, blueprint.hidden
        num_experts = config.integer("num_local_experts", config.integer("num_experts", 60))
        inner = config.integer("moe_intermediate_size", 1408)
        shared_inner = config.integer("shared_expert_intermediate_size", 5632)
        top_k = num_experts_per_token(config, num_experts, default=4, has_shared=True)
        normalizes = config.flag("norm_topk_prob")
        dense_indices = dense_layers(config, blueprint.layers)
        read_dense = gated_mlps(load, blueprint)

        def read(name: str, layer: int) -> FeedForward:
            if layer in dense_indices:
                return read_dense(name, layer)
            return SharedExperts(
                Experts(
                    load_router(load, f"{name}.{_NAMES.router}", num_experts, hidden),
                    load_experts(load, f"{name}.{_NAMES.experts}", num_experts, hidden, inner),
                    top_k,
                    "all_normed" if normalizes else "all",
                    blueprint.activation,
                ),
                GatedMLP.load(load, f"{name}.shared_expert", hidden, shared_inner, blueprint.activation),
                load_router(load, f"{name}.{_SHARED_GATE}", 1, hidden),
            )

        return read


def _windows(config: HuggingFaceConfig) -> tuple[int | None, ...]:
    """Return the window of each layer.

    If ``use_sliding_window`` is true, layers with an even index below ``max_window_layers`` have a window by
    default.
    """
    has_windows = config.flag("use_sliding_window")
    num_window_layers = config.integer("max_window_layers", 28, minimum=0) if has_windows else 0
    layers = range(num_layers(config))
    default = tuple(SLIDING if layer % 2 == 0 and layer < num_window_layers else FULL for layer in layers)
    return layer_windows(config, layer_types(config, default), 4096, has_windows=has_windows)


_SHARED_GATE = "shared_expert_gate"
_NAMES = TensorNames(other_tables=(f".{_SHARED_GATE}.weight",))
