"""`BlockParts`: functions that read the parts of a decoder block. `llama_parts` returns Llama's parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from torch import Tensor

from penstock.distributed import Part
from penstock.kernels import StepInputs
from penstock.nn.attention import Attention
from penstock.nn.blueprint import Blueprint
from penstock.nn.loader import Loader
from penstock.nn.mlp import MLP, GatedMLP
from penstock.nn.norm import GatheredNorm, LoadNorm, Norm, select_weights


class FeedForward(Protocol):
    """The feed-forward layer of a block, which computes each row independently: gated MLP, MLP or experts."""

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        """``x [T, E] -> [T, E]``."""
        ...


LoadFeedForward: TypeAlias = Callable[[str, int], FeedForward]
"""Reads the feed-forward layer of a block, given its full name in the checkpoint and the block's number."""


LoadAttention: TypeAlias = Callable[[str, int], Attention]
"""Reads the attention of a block, given its full name in the checkpoint and the block's number."""


@dataclass(frozen=True, slots=True)
class BlockParts:
    """Functions that read the parts of a block. `norm` also reads the final norm of the network."""

    attention: LoadAttention
    feed_forward: LoadFeedForward
    norm: LoadNorm


def gated_mlps(load: Loader, blueprint: Blueprint) -> LoadFeedForward:
    """Return a function that reads `GatedMLP` layers with the sizes of a blueprint."""
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
    """Return a function that reads `MLP` layers.

    The last name in ``blueprint.names.gate_up`` is the name of the up matrix.
    """
    hidden, inner, bias = blueprint.hidden, blueprint.inner, blueprint.mlp_bias
    up, down = blueprint.names.gate_up[-1], blueprint.names.down

    def read(name: str, layer: int) -> MLP:
        part = load.inner_part(f"{name}.{down}", inner)
        inputs = None if load.shard.is_whole else part
        return MLP(
            load.linear(f"{name}.{up}", inner, hidden, bias=bias, outputs=load.rank_outputs([part])),
            load.linear(f"{name}.{down}", hidden, inner, bias=bias, inputs=inputs),
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
    """Return functions that read the parts of Llama's blocks: `Attention`, `GatedMLP` and `RMSNorm`."""
    return BlockParts(attentions(load, blueprint), gated_mlps(load, blueprint), rms_norms(load, blueprint))


def attentions(
    load: Loader,
    blueprint: Blueprint,
    attention_class: type[Attention] = Attention,
    norm: LoadNorm | None = None,
) -> LoadAttention:
    """Return a function that reads attention layers of class ``attention_class``; see `load_attention`."""
    return lambda name, layer: load_attention(load, blueprint, name, layer, attention_class, norm)


def load_attention(
    load: Loader,
    blueprint: Blueprint,
    name: str,
    layer: int,
    attention_class: type[Attention] = Attention,
    norm: LoadNorm | None = None,
) -> Attention:
    """Read the attention of a block.

    Args:
        load: reads and packs the tensors.
        blueprint: sizes, options and tensor names.
        name: the full name of the attention layer in the checkpoint.
        layer: the number of the block.
        attention_class: the class to create.
        norm: reads the norms of queries and keys, if the blueprint has them; by default RMS norms.
    """
    norm = norm or rms_norms(load, blueprint)
    hidden, heads, kv_heads, dim = blueprint.hidden, blueprint.heads, blueprint.kv_heads, blueprint.head_dim
    names, sizes = blueprint.names, (heads * dim, kv_heads * dim, kv_heads * dim)
    part = load.shard.attention(heads, kv_heads)
    rank_parts = (part.heads.times(dim), part.kv_heads.times(dim), part.kv_heads.times(dim))
    value_path, values = f"{name}.{names.values}", None
    if names.values is None:
        output_sizes = {names.qkv[0]: sum(sizes)}
        starts = (0, sizes[0], sizes[0] + sizes[1])
        qkv_rows = [rows.shifted(start) for rows, start in zip(rank_parts, starts, strict=True)]
        outputs = {names.qkv[0]: qkv_rows}
        if attention_class.is_qkv_per_head:
            outputs = {names.qkv[0]: [part.heads.times(3 * dim)]}
    else:
        output_sizes = dict(zip(names.qkv, sizes, strict=True))
        outputs = {key: [rows] for key, rows in zip(names.qkv, rank_parts, strict=True)}
        query_path = f"{name}.{names.qkv[0]}"
        if load.has_separate_values(value_path, output_sizes[names.values], hidden, fused_with=query_path):
            value_rows = load.rank_outputs(outputs.pop(names.values))
            size = output_sizes.pop(names.values)
            values = load.values(value_path, size, hidden, bias=blueprint.qkv_bias, outputs=value_rows)
    rotary = blueprint.rotary_indices[layer]
    rank_outputs = {key: load.rank_outputs(rows) for key, rows in outputs.items()}
    inputs = None if load.shard.is_whole else rank_parts[0]
    sinks = load.tensor(f"{name}.{names.sinks}", heads) if blueprint.has_sinks else None
    return attention_class(
        load.fused(name, output_sizes, hidden, bias=blueprint.qkv_bias, outputs=rank_outputs),
        load.linear(f"{name}.{names.output}", hidden, heads * dim, bias=blueprint.output_bias, inputs=inputs),
        layer,
        part.heads.size,
        part.kv_heads.size,
        dim,
        blueprint.attention_scale,
        rotary,
        blueprint.attention_soft_cap,
        _head_norm(load, norm, blueprint, f"{name}.{names.query_norm}", heads, "heads"),
        _head_norm(load, norm, blueprint, f"{name}.{names.key_norm}", kv_heads, "kv_heads"),
        None if sinks is None else sinks[part.heads.start : part.heads.stop].contiguous(),
        values,
        window=blueprint.windows[layer],
        is_interleaved=rotary is not None and blueprint.rotaries[rotary].is_interleaved,
    )


def _head_norm(
    load: Loader,
    read: LoadNorm,
    blueprint: Blueprint,
    name: str,
    heads: int,
    head_kind: Literal["heads", "kv_heads"],
) -> Norm | None:
    """Return the norm of this rank's queries or keys, by ``head_kind``; None if the blueprint has none."""
    if blueprint.head_norms is None:
        return None
    dim = blueprint.head_dim
    norm = read(name, dim * (heads if blueprint.head_norms == "together" else 1))
    shard = load.shard
    if shard.collectives is None:
        return norm
    attention_parts = shard.attention_parts(blueprint.heads, blueprint.kv_heads)
    parts = [part.heads if head_kind == "heads" else part.kv_heads for part in attention_parts]
    if norm.weight.dim() == 2:  # [H, D]: weights for each head
        return select_weights(norm, parts[shard.rank : shard.rank + 1])
    if blueprint.head_norms == "each":
        return norm
    parts = [part.times(dim) for part in parts]
    start = sum(part.size for part in parts[: shard.rank])
    rank_part = Part(start, start + parts[shard.rank].size)
    widths = tuple(part.size for part in parts)
    return GatheredNorm(select_weights(norm, parts), shard.collectives, widths, rank_part)
