"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): mixture of experts; Q and K norms over all heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.nn import (
    Blueprint,
    Experts,
    Loader,
    LoadFeedForward,
    load_experts,
    load_router,
    num_experts_per_token,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class OlmoeModel(TransformerModel):
    """Reads the configuration of OLMoE and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        if config.get("clip_qkv") is not None:
            raise ConfigError(
                "clip_qkv", f"was {config.clip_qkv!r}: clipping of queries, keys and values is not supported"
            )
        bias = config.flag("attention_bias")
        return Blueprint.from_huggingface(
            config,
            norm_eps=config.number("rms_norm_eps", 1e-5),
            head_norms="together",
            qkv_bias=bias,
            output_bias=bias,
        )

    @classmethod
    def feed_forward(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig
    ) -> LoadFeedForward:
        config, names, hidden = huggingface_config, blueprint.names, blueprint.hidden
        num_experts = config.integer("num_local_experts", config.integer("num_experts", 64))
        top_k = num_experts_per_token(config, num_experts, default=8)
        normalizes = config.flag("norm_topk_prob")

        def read(name: str, layer: int) -> Experts:
            return Experts(
                load_router(load, f"{name}.{names.router}", num_experts, hidden),
                load_experts(load, f"{name}.{names.experts}", num_experts, hidden, blueprint.inner),
                top_k,
                "all_normed" if normalizes else "all",
                blueprint.activation,
            )

        return read
