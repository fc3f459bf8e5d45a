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
    """Reads the configuration of Qwen 2 with experts and builds its network."""

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
        return gated_shared_experts(
            load, blueprint, huggingface_config, num_experts=60, top_k=4, inner=1408, shared_inner=5632
        )


def gated_shared_experts(
    load: Loader,
    blueprint: Blueprint,
    config: HuggingFaceConfig,
    *,
    num_experts: int,
    top_k: int,
    inner: int,
    shared_inner: int,
    normalizes: bool = False,
) -> LoadFeedForward:
    """Return a function that reads experts with a gated shared expert, or a dense layer.

    The family's values apply if their keys are absent from ``config``.

    Args:
        load: reads and packs the tensors.
        blueprint: sizes and tensor names.
        config: the checkpoint's configuration.
        num_experts: the family's number of experts.
        top_k: the family's number of experts per token.
        inner: the family's inner size of an expert.
        shared_inner: the family's inner size of the shared expert.
        normalizes: whether the family normalizes the weights of the selected experts.
    """
    hidden, names = blueprint.hidden, blueprint.names
    num_experts = config.integer("num_local_experts", config.integer("num_experts", num_experts))
    inner = config.integer("moe_intermediate_size", inner)
    shared_inner = config.integer("shared_expert_intermediate_size", shared_inner)
    top_k = num_experts_per_token(config, num_experts, default=top_k, has_shared=True)
    normalizes = config.flag("norm_topk_prob", normalizes)
    dense_indices = dense_layers(config, blueprint.layers)
    read_dense = gated_mlps(load, blueprint)

    def read(name: str, layer: int) -> FeedForward:
        if layer in dense_indices:
            return read_dense(name, layer)
        return SharedExperts(
            Experts(
                load_router(load, f"{name}.{names.router}", num_experts, hidden),
                load_experts(load, f"{name}.{names.experts}", num_experts, hidden, inner),
                top_k,
                "all_normed" if normalizes else "all",
                blueprint.activation,
            ),
            GatedMLP.load(load, f"{name}.shared_expert", hidden, shared_inner, blueprint.activation),
            load_router(load, f"{name}.{SHARED_GATE}", 1, hidden),
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


SHARED_GATE = "shared_expert_gate"
"""The name of the gate of the shared expert."""
_NAMES = TensorNames(unquantized=(f".{SHARED_GATE}.weight",))
