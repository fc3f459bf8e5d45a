"""Phi 3.5 MoE (Abdin et al. 2024, arXiv:2404.14219): experts, layer norms, and biases.

The router is `penstock.kernels.SparseMixer`. With LongRoPE, cosines and sines are multiplied by
``short_mscale`` of ``config.json``, and sequences longer than the original maximum length are refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.architectures.decoder import Network
from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.kernels import SparseMixer
from penstock.nn import (
    BlockParts,
    Blueprint,
    DecoderNetwork,
    Experts,
    Loader,
    LoadFeedForward,
    TensorNames,
    check_head_dim,
    layer_norms,
    load_experts,
    load_router,
    num_experts_per_token,
    rope_values,
    uniform_windows,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class PhimoeModel(TransformerModel):
    """Reads the configuration of Phi 3.5 MoE and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        check_head_dim(config)
        bias = config.flag("attention_bias")
        blueprint = Blueprint.from_huggingface(
            config,
            default_rope_theta=1e6,
            rope_parameters=_rope_parameters(config),
            norm_eps=config.number("rms_norm_eps", 1e-5),
            windows=uniform_windows(config),
            qkv_bias=bias,
            output_bias=bias,
            names=_NAMES,
        )
        (rotary,) = blueprint.rotaries
        if rotary.kind != "longrope":
            return blueprint
        return replace(blueprint, max_length=min(blueprint.max_length, rotary.max_positions))

    @classmethod
    def parts(cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig) -> BlockParts:
        parts = super().parts(load, blueprint, huggingface_config)
        return replace(parts, norm=layer_norms(load, blueprint))

    @classmethod
    def build(cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int) -> Network:
        blueprint = cls.blueprint(huggingface_config)
        parts = cls.parts(load, blueprint, huggingface_config)
        bias = huggingface_config.flag("lm_head_bias")
        return DecoderNetwork.load(load, blueprint, max_length, parts, head_bias=bias)

    @classmethod
    def feed_forward(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig
    ) -> LoadFeedForward:
        config, hidden = huggingface_config, blueprint.hidden
        num_experts = config.integer("num_local_experts", 16)
        top_k = num_experts_per_token(config, num_experts, default=2)
        if top_k != 2:
            raise ConfigError("num_experts_per_tok", f"must be 2 in this family, was {top_k}")
        routing = SparseMixer(config.number("router_jitter_noise", 0.01))
        matrix_names = ("w1", "w3", "w2")

        def read(name: str, layer: int) -> Experts:
            return Experts(
                load_router(load, f"{name}.{_NAMES.router}", num_experts, hidden),
                load_experts(
                    load, f"{name}.{_NAMES.experts}", num_experts, hidden, blueprint.inner, matrix_names
                ),
                top_k,
                routing,
                blueprint.activation,
            )

        return read


def _rope_parameters(config: HuggingFaceConfig) -> dict[str, object]:
    """Return the RoPE parameters, with ``short_mscale`` as ``attention_factor``.

    Raises:
        ConfigError: ``short_mscale`` and ``long_mscale`` differ.
    """
    values = rope_values(config)
    short, long = values.pop("short_mscale", None), values.pop("long_mscale", None)
    if short != long:
        raise ConfigError("rope_scaling.long_mscale", f"must be short_mscale, {short!r}, was {long!r}")
    if short is not None:
        values["attention_factor"] = short
    return values


_NAMES = TensorNames(feed_forward="block_sparse_moe")
