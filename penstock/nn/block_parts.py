"""`BlockParts`: how the parts of a decoder block are read, and the functions that read those of Llama."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from penstock.kernels import StepInputs
from penstock.nn.attention import Attention
from penstock.nn.blueprint import Blueprint
from penstock.nn.loader import Loader
from penstock.nn.mlp import MLP, GatedMLP
from penstock.nn.norm import LoadNorm, Norm


class FeedForward(Protocol):
    """The feed-forward part of a block: a gated layer, or experts. It computes each row independently."""

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        """``x [T, E] -> [T, E]``."""
        ...


LoadFeedForward: TypeAlias = Callable[[str, int], FeedForward]
"""Reads the feed-forward layer of a block, given its full name in the checkpoint and the block's number."""


LoadAttention: TypeAlias = Callable[[str, int], Attention]
"""Reads the attention of a block, given its full name in the checkpoint and the block's number."""


@dataclass(frozen=True, slots=True)
class BlockParts:
    """How the parts of a block are read. `norm` also reads the final norm of the network."""

    attention: LoadAttention
    feed_forward: LoadFeedForward
    norm: LoadNorm


def gated_mlps(load: Loader, blueprint: Blueprint) -> LoadFeedForward:
    """Return a function that reads `GatedMLP` layers of a blueprint's sizes."""
    names = blueprint.names

    def read(name: str, layer: int) -> GatedMLP:
        return GatedMLP.load(
            load,
            name,
            blueprint.hidden,
            blueprint.inner,
            blueprint.activation,
            bias=blueprint.mlp_bias,
            gate_up=names.gate_up,
            down=names.down,
        )

    return read


def plain_mlps(load: Loader, blueprint: Blueprint) -> LoadFeedForward:
    """Return a function that reads `MLP` layers of a blueprint's sizes; the up matrix is ``gate_up[-1]``."""
    hidden, inner, bias = blueprint.hidden, blueprint.inner, blueprint.mlp_bias
    up, down = blueprint.names.gate_up[-1], blueprint.names.down

    def read(name: str, layer: int) -> MLP:
        return MLP(
            load.linear(f"{name}.{up}", inner, hidden, bias=bias),
            load.linear(f"{name}.{down}", hidden, inner, bias=bias),
            blueprint.activation,
        )

    return read


def rms_norms(load: Loader, blueprint: Blueprint) -> LoadNorm:
    """Return a function that reads `RMSNorm` layers."""

    def read(name: str, size: int) -> Norm:
        return load.norm(name, size, blueprint.norm_eps, offset=blueprint.norm_offset)

    return read


def layer_norms(load: Loader, blueprint: Blueprint, *, bias: bool = True) -> LoadNorm:
    """Return a function that reads `LayerNorm` layers, with or without a bias."""

    def read(name: str, size: int) -> Norm:
        return load.layer_norm(name, size, blueprint.norm_eps, bias=bias, offset=blueprint.norm_offset)

    return read


def llama_parts(load: Loader, blueprint: Blueprint) -> BlockParts:
    """Return the parts of Llama's blocks: `Attention`, `GatedMLP` and `RMSNorm`."""
    return BlockParts(attentions(load, blueprint), gated_mlps(load, blueprint), rms_norms(load, blueprint))


def attentions(
    load: Loader, blueprint: Blueprint, kind: type[Attention] = Attention, norm: LoadNorm | None = None
) -> LoadAttention:
    """Return a function that reads attention layers of this class; see `load_attention`."""
    return lambda name, layer: load_attention(load, blueprint, name, layer, kind, norm)


def load_attention(
    load: Loader,
    blueprint: Blueprint,
    name: str,
    layer: int,
    kind: type[Attention] = Attention,
    norm: LoadNorm | None = None,
) -> Attention:
    """Read the attention of a block.

    Args:
        load: reads and packs the tensors.
        blueprint: sizes, options and tensor names.
        name: the full name of the attention in the checkpoint.
        layer: the number of the block.
        kind: the class of the attention.
        norm: reads the norms of queries and keys, if the blueprint has them; by default RMS norms.
    """
    norm = norm or rms_norms(load, blueprint)
    hidden, heads, kv_heads, dim = blueprint.hidden, blueprint.heads, blueprint.kv_heads, blueprint.head_dim
    names, sizes = blueprint.names, (heads * dim, kv_heads * dim, kv_heads * dim)
    value_path, values = f"{name}.{names.values}", None
    if names.values is None:
        parts = {names.qkv[0]: sum(sizes)}
    else:
        parts = dict(zip(names.qkv, sizes, strict=True))
        if load.has_separate_values(value_path, parts[names.values], hidden):
            values = load.values(value_path, parts.pop(names.values), hidden, bias=blueprint.qkv_bias)
    rotary = blueprint.rotary_of_layer[layer]
    return kind(
        load.fused(name, parts, hidden, bias=blueprint.qkv_bias),
        load.linear(f"{name}.{names.output}", hidden, heads * dim, bias=blueprint.output_bias),
        layer,
        heads,
        kv_heads,
        dim,
        blueprint.attention_scale,
        rotary,
        blueprint.attention_soft_cap,
        _head_norm(norm, blueprint, f"{name}.{names.query_norm}", heads),
        _head_norm(norm, blueprint, f"{name}.{names.key_norm}", kv_heads),
        load.tensor(f"{name}.{names.sinks}", heads) if blueprint.sinks else None,
        values,
        window=blueprint.windows[layer],
        is_interleaved=rotary is not None and blueprint.rotaries[rotary].is_interleaved,
    )


def _head_norm(norm: LoadNorm, blueprint: Blueprint, name: str, heads: int) -> Norm | None:
    if blueprint.head_norms is None:
        return None
    return norm(name, blueprint.head_dim * (heads if blueprint.head_norms == "together" else 1))
