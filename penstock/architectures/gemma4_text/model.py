"""Gemma 4 (Google DeepMind 2026).

The family has layers with and without a window, whose heads have different sizes. Some models have per-layer
embeddings and layers that read the keys and values of earlier layers, others have experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.architectures.decoder import kv_dtype
from penstock.architectures.gemma4_text.config import LayerConfig, layer_configs, rotary_configs
from penstock.architectures.gemma4_text.network import (
    ExpertLayer,
    Gemma4Attention,
    Gemma4Block,
    Gemma4Network,
    LayerInput,
    PerLayerEmbedding,
)
from penstock.architectures.transformer import TransformerModel
from penstock.errors import ConfigError
from penstock.kv_cache import KVCacheSpec, KVGroup
from penstock.nn import (
    FULL,
    Blueprint,
    Experts,
    GatedMLP,
    Head,
    Loader,
    Norm,
    RMSNorm,
    Rotary,
    TensorNames,
    load_embedding,
    load_experts,
    load_router,
    num_experts_per_token,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig, PipelineConfig

_PER_LAYER_TABLE = "embed_tokens_per_layer"
_NAMES = TensorNames(
    norms_before=("input_layernorm", "pre_feedforward_layernorm"),
    router="router.proj",
    replicated=(".per_layer_input_gate.weight", ".per_layer_projection.weight"),
    token_tables=(f"{_PER_LAYER_TABLE}.weight",),
)


class Gemma4TextModel(TransformerModel):
    """Reads the configuration of Gemma 4 and builds its network."""

    @classmethod
    def blueprint(cls, huggingface_config: HuggingFaceConfig) -> Blueprint:
        """Return the sizes of the decoder. Heads can have other sizes in some layers, see `layer_configs`."""
        config = huggingface_config
        if config.get("use_bidirectional_attention") == "all":
            raise ConfigError(
                "use_bidirectional_attention", "is 'all', but text generation needs causal attention"
            )
        layers = layer_configs(config)
        attention_bias = config.flag("attention_bias")
        return Blueprint.from_huggingface(
            config,
            default_head_dim=256,
            activation_key="hidden_activation",
            default_activation="gelu_pytorch_tanh",
            default_tied_head=True,
            block_norms="around",
            head_norms="each",
            attention_scale=1.0,
            embedding_scale=config.integer("hidden_size") ** 0.5,
            logit_soft_cap=config.optional_number("final_logit_softcapping"),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            windows=tuple(layer.window for layer in layers),
            max_length=config.integer("max_position_embeddings"),
            rotaries=rotary_configs(config, layers),
            rotary_indices=tuple(layer.rotary_index for layer in layers),
            names=replace(_NAMES, unread=_unread_tensors(layers)),
        )

    @classmethod
    def kv_spec(cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> KVCacheSpec:
        dtype = kv_dtype(pipeline_config)
        groups: dict[tuple[int, int, int | None], list[int]] = {}
        for layer in layer_configs(huggingface_config):
            if not layer.is_kv_shared:
                groups.setdefault(layer.cache_options, []).append(layer.cache_layer)
        return KVCacheSpec(
            tuple(
                KVGroup(tuple(layers), kv_heads, head_dim, dtype, window)
                for (kv_heads, head_dim, window), layers in groups.items()
            )
        )

    @classmethod
    def build(cls, load: Loader, huggingface_config: HuggingFaceConfig, max_length: int) -> Gemma4Network:
        return load_network(load, cls.blueprint(huggingface_config), huggingface_config, max_length)


def load_network(
    load: Loader,
    blueprint: Blueprint,
    config: HuggingFaceConfig,
    max_length: int,
    placeholder_ids: Collection[int] = (),
) -> Gemma4Network:
    """Read the network for sequences of up to ``max_length`` tokens.

    Args:
        load: reads and packs the tensors.
        blueprint: sizes, options and tensor names.
        config: the configuration of the text model.
        max_length: the number of positions in the tables of the rotary embeddings.
        placeholder_ids: the token ids that stand for media; see `Gemma4Network.embedded_ids`.
    """
    vocab_size, hidden, names = blueprint.vocab_size, blueprint.hidden, blueprint.names
    tied_head = names.head if blueprint.tied_head else None
    table = load.table(names.embedding_path, vocab_size, hidden, tied_head=tied_head)
    layers = layer_configs(config)
    return Gemma4Network(
        load_embedding(load, table, vocab_size, _rounded(load, blueprint.embedding_scale)),
        _per_layer_embedding(load, blueprint, config),
        tuple(Rotary(rotary, max_length, load.device) for rotary in blueprint.rotaries),
        tuple(_block(load, blueprint, config, index, layer) for index, layer in enumerate(layers)),
        _norm(load, blueprint, names.norm_path, hidden),
        Head(
            load.head(names.head, vocab_size, hidden, tied_to=table if blueprint.tied_head else None),
            soft_cap=blueprint.logit_soft_cap,
        ),
        _embedded_ids(load, blueprint, config, placeholder_ids) if placeholder_ids else None,
    )


def _unread_tensors(layers: Iterable[LayerConfig]) -> tuple[str, ...]:
    """Return patterns of the tensors of keys and values in layers that read those of an earlier layer.

    Some checkpoints contain these tensors.
    """
    return tuple(
        f"{_NAMES.block_path(index)}.{_NAMES.attention}.{part}.*"
        for index, layer in enumerate(layers)
        if layer.is_kv_shared
        for part in (*_NAMES.qkv[1:], _NAMES.key_norm)
    )


def _embedded_ids(
    load: Loader, blueprint: Blueprint, config: HuggingFaceConfig, placeholder_ids: Collection[int]
) -> Tensor:
    """Return `Gemma4Network.embedded_ids`.

    Raises:
        ConfigError: the vocabulary has no such placeholder or padding token.
    """
    pad_token_id = config.integer("pad_token_id", 0, minimum=0)
    largest_id = max(pad_token_id, *placeholder_ids)
    if largest_id >= blueprint.vocab_size:
        raise ConfigError(
            "vocab_size", f"is {blueprint.vocab_size}, but a placeholder or padding token has id {largest_id}"
        )
    ids = torch.arange(blueprint.vocab_size)[:, None]
    ids[list(placeholder_ids)] = pad_token_id
    return ids.to(load.device)


def _rounded(load: Loader, scale: float) -> float:
    """Return a scale of embeddings, rounded to the type of the activations."""
    return float(torch.tensor(scale, dtype=load.dtype))


def _norm(load: Loader, blueprint: Blueprint, name: str, size: int) -> RMSNorm:
    return load.norm(name, size, blueprint.norm_eps)


def _per_layer_size(config: HuggingFaceConfig) -> int:
    """Return P, the size of a per-layer embedding; 0 if the model has none."""
    return config.integer("hidden_size_per_layer_input", 256, minimum=0)


def _per_layer_embedding(
    load: Loader, blueprint: Blueprint, config: HuggingFaceConfig
) -> PerLayerEmbedding | None:
    size = _per_layer_size(config)
    if not size:
        return None
    prefix, layers = blueprint.names.prefix, blueprint.layers
    num_rows = config.integer("vocab_size_per_layer_input", 262_144)
    table = load.table(f"{prefix}{_PER_LAYER_TABLE}", num_rows, layers * size)
    return PerLayerEmbedding(
        load_embedding(load, table, num_rows, _rounded(load, size**0.5)),
        load.linear(f"{prefix}per_layer_model_projection", layers * size, blueprint.hidden),
        blueprint.hidden**-0.5,
        _norm(load, blueprint, f"{prefix}per_layer_projection_norm", size),
        layers,
    )


def _block(
    load: Loader, blueprint: Blueprint, config: HuggingFaceConfig, index: int, layer: LayerConfig
) -> Gemma4Block:
    name, hidden, activation = blueprint.names.block_path(index), blueprint.hidden, blueprint.activation
    per_layer_size = _per_layer_size(config)

    def norms(before: str, after: str) -> tuple[Norm, Norm]:
        return (
            _norm(load, blueprint, f"{name}.{before}", hidden),
            _norm(load, blueprint, f"{name}.{after}", hidden),
        )

    is_wide = layer.is_kv_shared and config.flag("use_double_wide_mlp")
    layer_input = None
    if per_layer_size:
        layer_input = LayerInput(
            load.linear(f"{name}.per_layer_input_gate", per_layer_size, hidden),
            load.linear(f"{name}.per_layer_projection", hidden, per_layer_size),
            _norm(load, blueprint, f"{name}.post_per_layer_input_norm", hidden),
            activation,
        )
    return Gemma4Block(
        norms("input_layernorm", "post_attention_layernorm"),
        _attention(load, blueprint, name, layer),
        norms("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        GatedMLP.load(load, f"{name}.mlp", hidden, blueprint.inner * (2 if is_wide else 1), activation),
        _experts(load, blueprint, config, name) if config.flag("enable_moe_block") else None,
        layer_input,
        load.number(f"{name}.layer_scalar", 1),
    )


def _attention(load: Loader, blueprint: Blueprint, block_name: str, layer: LayerConfig) -> Gemma4Attention:
    names, hidden, dim = blueprint.names, blueprint.hidden, layer.head_dim
    name, bias = f"{block_name}.{names.attention}", blueprint.qkv_bias
    rank = load.shard.attention(layer.heads, layer.kv_heads)
    query, key, value = names.qkv
    sizes = {query: layer.heads * dim}
    rank_parts = {query: [rank.heads.times(dim)]}
    values = None
    if not layer.is_kv_shared:
        sizes[key], rank_parts[key] = layer.kv_heads * dim, [rank.kv_heads.times(dim)]
        if not layer.are_values_keys:
            path, size = f"{name}.{value}", layer.kv_heads * dim
            if load.has_separate_values(path, size, hidden, fused_with=f"{name}.{query}"):
                value_outputs = load.rank_outputs(rank_parts[key])
                values = load.values(path, size, hidden, bias=bias, outputs=value_outputs)
            else:
                sizes[value], rank_parts[value] = size, rank_parts[key]
    outputs = {part: load.rank_outputs(rows) for part, rows in rank_parts.items()}
    unit_weights = torch.ones(dim, dtype=load.dtype, device=load.device)
    return Gemma4Attention(
        load.fused(name, sizes, hidden, bias=bias, outputs=outputs),
        load.linear(
            f"{name}.{names.output}",
            hidden,
            layer.heads * dim,
            bias=blueprint.output_bias,
            inputs=None if load.shard.is_whole else rank_parts[query][0],
        ),
        layer.cache_layer,
        rank.heads.size,
        rank.kv_heads.size,
        dim,
        blueprint.attention_scale,
        layer.rotary_index,
        q_norm=_norm(load, blueprint, f"{name}.{names.query_norm}", dim),
        k_norm=None if layer.is_kv_shared else _norm(load, blueprint, f"{name}.{names.key_norm}", dim),
        values=values,
        v_norm=RMSNorm(unit_weights, blueprint.norm_eps),
        are_values_keys=layer.are_values_keys,
        is_kv_shared=layer.is_kv_shared,
        is_causal_in_spans=layer.layer_type == FULL,
    )


def _experts(load: Loader, blueprint: Blueprint, config: HuggingFaceConfig, name: str) -> ExpertLayer:
    hidden = blueprint.hidden
    num_experts, inner = config.integer("num_experts"), config.integer("moe_intermediate_size")
    scales = load.source.tensor(f"{name}.router.scale", (hidden,)).float() * hidden**-0.5
    output_scales = load.source.tensor(f"{name}.router.per_expert_scale", (num_experts,)).float()
    return ExpertLayer(
        RMSNorm(scales.to(load.device), blueprint.norm_eps),
        (
            _norm(load, blueprint, f"{name}.pre_feedforward_layernorm_2", hidden),
            _norm(load, blueprint, f"{name}.post_feedforward_layernorm_2", hidden),
        ),
        Experts(
            load_router(load, f"{name}.{blueprint.names.router}", num_experts, hidden),
            load_experts(load, f"{name}.{blueprint.names.experts}", num_experts, hidden, inner),
            num_experts_per_token(config, num_experts, 8, key="top_k_experts"),
            "chosen",
            blueprint.activation,
            output_scales=output_scales[:, None].contiguous().to(load.device),
        ),
        _norm(load, blueprint, f"{name}.post_feedforward_layernorm_1", hidden),
    )
