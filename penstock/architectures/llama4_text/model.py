"""Llama 4 (Meta 2025, The Llama 4 herd): chunked attention, and experts with scaled inputs.

By default, three of four layers apply interleaved RoPE, then norms of queries and keys, and attend within
chunks of consecutive tokens. The other layers have no RoPE and attend to all keys. By default, these layers
scale each query by a factor that grows with its position. The input of a selected expert is multiplied by the
sigmoid of the expert's router logit. A shared expert computes every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.architectures.decoder import Network
from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.kernels import Activation, PackedExperts, ScoreRouting, StepInputs
from penstock.kv_cache import KVCacheSpec
from penstock.nn import (
    FULL,
    Attention,
    BlockParts,
    Blueprint,
    DecoderNetwork,
    FeedForward,
    GatedMLP,
    Linear,
    Loader,
    LoadFeedForward,
    RMSNorm,
    Rotary,
    RotaryConfig,
    RotaryRows,
    TensorNames,
    attentions,
    gated_mlps,
    interleaved,
    load_experts,
    load_router,
    load_stacked_experts,
    num_experts_per_token,
    num_layers,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig, PipelineConfig


@dataclass(frozen=True, slots=True)
class Llama4Attention(Attention):
    """Attention with norms after RoPE. Layers without RoPE have no norms and can scale queries instead."""

    def _normalize_and_rotate(
        self, q: Tensor, k: Tensor, rows: Sequence[RotaryRows], step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        if self.rotary_index is None:
            if len(rows) > 1:
                q, _ = step.ops.rotary(q, k[:, :0], *rows[1])
            return q, k
        q, k = self._rotate(q, k, rows, step)
        return self._apply_norm(q, self.q_norm, step), self._apply_norm(k, self.k_norm, step)


class QueryScale(Rotary):
    """Rotary tables without rotation: the cosines are scale factors of queries, the sines are 0.

    The factor at position p is ``1 + attn_scale * ln(1 + floor((p + 1) / floor_scale))``.
    """

    def __init__(self, config: RotaryConfig, max_length: int, device: torch.device, scale: Tensor) -> None:
        super().__init__(config, max_length, device)
        self.cos = scale[:, None].expand(-1, config.dim // 2).contiguous().to(device)
        self.sin = torch.zeros_like(self.cos)


@dataclass(frozen=True, slots=True)
class Llama4Experts:
    """Experts whose inputs are multiplied by the router's scores, and a shared expert."""

    router: Linear  # [E] -> [N]
    packed: PackedExperts
    top_k: int
    activation: Activation
    shared: GatedMLP

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:  # [T, E] -> [T, E]
        ops, logits = step.ops, self.router(x, step)
        scores, ids = ops.route(logits, self.top_k, _ROUTING)
        # The weights [T, 1] of the outputs are 1, because the inputs are multiplied by the router's scores.
        ones, _ = ops.route(logits, 1, "all_normed")
        total = self.shared(x, step)
        for index in range(self.top_k):
            column = slice(index, index + 1)
            scaled = ops.scale_rows(x, scores[:, column])
            routed = ops.experts(scaled, self.packed, ones, ids[:, column], self.activation, lora=step.lora)
            if self.packed.ranks is not None:
                routed = ops.all_reduce(routed, self.packed.ranks)
            total = ops.add(total, routed)
        return total


class Llama4TextModel(TransformerModel):
    """Reads the configuration of Llama 4 and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        config = huggingface_config
        bias = config.flag("attention_bias")
        return interleaved(
            Blueprint.from_huggingface(
                config,
                default_head_dim=128,
                default_rope_theta=500_000.0,
                norm_eps=config.number("rms_norm_eps", 1e-5),
                qkv_bias=bias,
                output_bias=bias,
                rotary_indices=tuple(0 if rope else None for rope in _rope_layers(config)),
                windows=_chunk_sizes(config),
                names=_NAMES,
            )
        )

    @classmethod
    def kv_spec(cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> KVCacheSpec:
        spec = super().kv_spec(pipeline_config, huggingface_config)
        groups = tuple(replace(group, is_chunked=group.window is not None) for group in spec.groups)
        return replace(spec, groups=groups)

    @classmethod
    def parts(cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig) -> BlockParts:
        read = attentions(load, blueprint, Llama4Attention)
        norm = None
        if huggingface_config.flag("use_qk_norm", True):
            ones = torch.ones(blueprint.head_dim, dtype=load.dtype, device=load.device)
            norm = RMSNorm(ones, blueprint.norm_eps)

        def attention(name: str, layer: int) -> Attention:
            return replace(read(name, layer), q_norm=norm, k_norm=norm)

        return replace(super().parts(load, blueprint, huggingface_config), attention=attention)

    @classmethod
    def build(cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int) -> Network:
        config = huggingface_config
        blueprint = cls.blueprint(config)
        parts = cls.parts(load, blueprint, config)
        network = DecoderNetwork.load(load, blueprint, max_length, parts)
        if not config.flag("attn_temperature_tuning", True):
            return network
        (rotary,) = network.rotaries
        sizes = replace(rotary.config, dim=blueprint.head_dim)
        periods = (torch.arange(max_length) + 1) // config.integer("floor_scale", 8192)
        scale = 1 + config.number("attn_scale", 0.1) * torch.log1p(periods.float())
        return replace(network, rotaries=(rotary, QueryScale(sizes, max_length, load.device, scale)))

    @classmethod
    def feed_forward(
        cls, load: Loader, blueprint: Blueprint, huggingface_config: HuggingFaceConfig
    ) -> LoadFeedForward:
        config, hidden, inner = huggingface_config, blueprint.hidden, blueprint.inner
        num_experts = config.integer("num_local_experts", 16)
        top_k = num_experts_per_token(config, num_experts, default=1)
        expert_layers = _expert_layers(config, blueprint.layers)
        dense_blueprint = replace(blueprint, inner=config.integer("intermediate_size_mlp", 16384))
        read_dense = gated_mlps(load, dense_blueprint)

        def read(name: str, layer: int) -> FeedForward:
            if layer not in expert_layers:
                return read_dense(name, layer)
            path = f"{name}.{_NAMES.experts}"
            names = f"{path}.gate_up_proj", f"{path}.down_proj"
            if names[0] in load.source:
                packed = load_stacked_experts(load, names, num_experts, hidden, inner, transposed=True)
            else:  # GGUF files: one tensor per expert
                packed = load_experts(load, path, num_experts, hidden, inner)
            return Llama4Experts(
                load_router(load, f"{name}.{_NAMES.router}", num_experts, hidden),
                packed,
                top_k,
                blueprint.activation,
                GatedMLP.load(load, f"{name}.shared_expert", hidden, inner, blueprint.activation),
            )

        return read


def _rope_layers(config: HuggingFaceConfig) -> tuple[bool, ...]:  # [L]
    """Return for each layer whether it has RoPE. In ``no_rope_layers``, 1 means RoPE and 0 means no RoPE."""
    layers = num_layers(config)
    flags = config.integers("no_rope_layers")
    if not flags:
        interval = config.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if len(flags) != layers or any(flag not in (0, 1) for flag in flags):
        raise ConfigError("no_rope_layers", f"must be a list of {layers} zeros and ones, was {list(flags)}")
    return tuple(bool(flag) for flag in flags)


def _chunk_sizes(config: HuggingFaceConfig) -> tuple[int | None, ...]:  # [L]
    """Return the attention chunk size of each layer in tokens; None for layers that attend to all keys."""
    has_rope = _rope_layers(config)
    types = config.texts("layer_types") or tuple(_CHUNKED if rope else FULL for rope in has_rope)
    if len(types) != len(has_rope) or set(types) - {FULL, _CHUNKED}:
        raise ConfigError("layer_types", f"must be {len(has_rope)} of {FULL} and {_CHUNKED}, was {types!r}")
    size = config.optional_integer("attention_chunk_size", 8192)
    return tuple(size if kind == _CHUNKED else None for kind in types)


def _expert_layers(config: HuggingFaceConfig, layers: int) -> set[int]:
    """Return the indices of layers with experts: ``moe_layers``, or every N-th layer.

    N is ``interleave_moe_layer_step``.
    """
    configured = config.integers("moe_layers")
    if configured is not None:
        return set(configured)
    interval = config.integer("interleave_moe_layer_step", 1)
    return set(range(interval - 1, layers, interval))


_CHUNKED = "chunked_attention"
_ROUTING = ScoreRouting("sigmoid", is_normed=False)
_NAMES = TensorNames(feed_forward="feed_forward", router="router")
