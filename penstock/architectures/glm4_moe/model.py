"""GLM 4 with experts (Zeng et al. 2025, arXiv:2508.06471): routing as in DeepSeek-V3, and partial RoPE.

The first layers are dense. All other layers have shared experts, and groups of routed experts. The router
selects experts by sigmoid score plus a bias. The multi-token prediction layers at the end are not loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.kernels import ScoreRouting
from penstock.nn import (
    Blueprint,
    Experts,
    FeedForward,
    GatedMLP,
    Loader,
    LoadFeedForward,
    SharedExperts,
    TensorNames,
    gated_mlps,
    load_correction_bias,
    load_experts,
    load_router,
    num_experts_per_token,
    num_layers,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class Glm4MoeModel(TransformerModel):
    """Reads the configuration of GLM 4 with experts and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        return Blueprint.from_huggingface(
            config,
            default_partial_rotary_factor=0.5,
            norm_eps=config.number("rms_norm_eps", 1e-5),
            head_norms="each" if config.flag("use_qk_norm") else None,
            qkv_bias=config.flag("attention_bias"),
            names=_NAMES,
        )

    @classmethod
    def ignored_tensors(cls, huggingface_config: HuggingFaceConfig) -> tuple[str, ...]:
        first_draft_layer = num_layers(huggingface_config)
        num_draft_layers = huggingface_config.integer("num_nextn_predict_layers", 1, minimum=0)
        patterns = (
            f"model.layers.{layer}.*"
            for layer in range(first_draft_layer, first_draft_layer + num_draft_layers)
        )
        return (*cls.ignored_weights, *patterns)

    @classmethod
    def feed_forward(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig
    ) -> LoadFeedForward:
        config, hidden = huggingface_config, blueprint.hidden
        num_experts = config.integer("num_local_experts", config.integer("n_routed_experts", 128))
        inner = config.integer("moe_intermediate_size", 1408)
        shared_inner = inner * config.integer("n_shared_experts", 1)
        top_k = num_experts_per_token(config, num_experts, default=8, has_shared=True)
        routing = group_routing(config, num_experts)
        num_dense_layers = config.integer("first_k_dense_replace", 1, minimum=0)
        read_dense = gated_mlps(load, blueprint)

        def read(name: str, layer: int) -> FeedForward:
            if layer < num_dense_layers:
                return read_dense(name, layer)
            router = f"{name}.{_NAMES.router}"
            return SharedExperts(
                Experts(
                    load_router(load, router, num_experts, hidden, is_float32=True),
                    load_experts(load, f"{name}.{_NAMES.experts}", num_experts, hidden, inner),
                    top_k,
                    routing,
                    blueprint.activation,
                    load_correction_bias(load, f"{router}.e_score_correction_bias", num_experts),
                    is_router_float32=True,
                ),
                GatedMLP.load(load, f"{name}.shared_experts", hidden, shared_inner, blueprint.activation),
            )

        return read


_NAMES = TensorNames(is_router_float32=True)


def group_routing(config: HuggingFaceConfig, num_experts: int) -> ScoreRouting:
    """Return the grouped routing of a ``config.json`` with the keys of DeepSeek-V3.

    Raises:
        ConfigError: ``n_group`` does not divide the number of experts, or ``topk_group`` exceeds ``n_group``.
    """
    num_groups, num_top_groups = config.integer("n_group", 1), config.integer("topk_group", 1)
    if num_experts % num_groups:
        raise ConfigError("n_group", f"{num_groups} groups do not divide {num_experts} experts")
    if num_top_groups > num_groups:
        raise ConfigError("topk_group", f"must be at most n_group ({num_groups}), was {num_top_groups}")
    return ScoreRouting(
        "sigmoid",
        is_normed=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        num_top_groups=num_top_groups,
    )
