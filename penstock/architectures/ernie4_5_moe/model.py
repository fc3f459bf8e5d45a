"""ERNIE 4.5 with experts (ERNIE Team, Baidu 2025, ERNIE 4.5 Technical Report).

The family has softmax routing with a correction bias, shared experts, and interleaved RoPE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.architectures.decoder import Network
from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.kernels import ScoreRouting
from penstock.nn import (
    Blueprint,
    DecoderNetwork,
    Experts,
    FeedForward,
    GatedMLP,
    Loader,
    LoadFeedForward,
    SharedExperts,
    TensorNames,
    gated_mlps,
    interleaved,
    load_correction_bias,
    load_experts,
    load_router,
    num_experts_per_token,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig


class Ernie45MoeModel(TransformerModel):
    """Reads the configuration of ERNIE 4.5 with experts and builds its network."""

    ignored_weights = (*TransformerModel.ignored_weights, "model.mtp_*")  # multi-token prediction layers

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        if config.number("compression_ratio", 1.0) != 1.0:
            raise ConfigError("compression_ratio", f"must be 1, was {config['compression_ratio']!r}")
        if config.get("moe_gate") not in (None, "topk"):
            raise ConfigError("moe_gate", f"must be 'topk' in this family, was {config['moe_gate']!r}")
        bias = config.flag("use_bias")
        return interleaved(
            Blueprint.from_huggingface(
                config,
                default_rope_theta=500_000.0,
                default_tied_head=True,
                norm_eps=config.number("rms_norm_eps", 1e-5),
                qkv_bias=bias,
                output_bias=bias,
                mlp_bias=bias,
                names=_NAMES,
            )
        )

    @classmethod
    def build(cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int) -> Network:
        blueprint = cls.blueprint(huggingface_config)
        parts = cls.parts(load, blueprint, huggingface_config)
        return DecoderNetwork.load(load, blueprint, max_length, parts, head_bias=blueprint.mlp_bias)

    @classmethod
    def feed_forward(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig
    ) -> LoadFeedForward:
        config, hidden, activation = huggingface_config, blueprint.hidden, blueprint.activation
        num_experts = config.integer("num_experts", config.integer("moe_num_experts", 64))
        inner = config.integer("moe_intermediate_size", 1536)
        num_shared = config.integer("moe_num_shared_experts", 2, minimum=0)
        top_k = num_experts_per_token(config, num_experts, default=6, key="moe_k", has_shared=True)
        routing = ScoreRouting("softmax", is_normed=True, min_sum=config.number("moe_norm_min", 1e-12))
        expert_layers = _expert_layers(config, blueprint.layers)
        read_dense, bias = gated_mlps(load, blueprint), blueprint.mlp_bias

        def read(name: str, layer: int) -> FeedForward:
            if layer not in expert_layers:
                return read_dense(name, layer)
            routed_experts = Experts(
                load_router(load, f"{name}.{_NAMES.router}", num_experts, hidden, is_float32=True),
                load_experts(load, f"{name}.{_NAMES.experts}", num_experts, hidden, inner),
                top_k,
                routing,
                activation,
                load_correction_bias(load, f"{name}.{_CORRECTION_BIAS}", 1, num_experts),
                is_router_float32=True,
            )
            if not num_shared:
                return routed_experts
            shared_path = f"{name}.shared_experts"
            return SharedExperts(
                routed_experts,
                GatedMLP.load(load, shared_path, hidden, inner * num_shared, activation, bias=bias),
            )

        return read


def _expert_layers(config: HuggingFaceConfig, layers: int) -> set[int]:
    """Return the indices of the layers with experts."""
    start = config.integer("moe_layer_start_index", 1, minimum=0)
    end = config.integer("moe_layer_end_index", -1, minimum=-1)
    interval = config.integer("moe_layer_interval", 1)
    last_layer = layers - 1 if end == -1 else end
    return {layer for layer in range(layers) if (layer + 1) % interval == 0 and start <= layer <= last_layer}


_CORRECTION_BIAS = "moe_statics.e_score_correction_bias"
_NAMES = TensorNames(is_router_float32=True, other_tables=(f".{_CORRECTION_BIAS}",))
