"""The network of a Llama-like decoder: embedding, blocks of attention and feed-forward layer, norm, head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from penstock.host.heartbeat import beat
from penstock.kernels import StepInputs
from penstock.nn.attention import Attention
from penstock.nn.blueprint import Blueprint
from penstock.nn.embedding import Embedding
from penstock.nn.head import Head
from penstock.nn.loader import Loader
from penstock.nn.mlp import GatedMLP
from penstock.nn.norm import RMSNorm
from penstock.nn.rotary import Rotary, RotaryRows


class FeedForward(Protocol):
    """The feed-forward part of a block: a gated layer, or experts. It computes each row independently."""

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        """``x [T, E] -> [T, E]``."""
        ...


LoadFeedForward: TypeAlias = Callable[[str, int], FeedForward]
"""Reads the feed-forward layer of a block, given its full name in the checkpoint and the block's number."""


@dataclass(frozen=True, slots=True)
class Branch:
    """The norms around a layer, and the addition of the layer's output to the residual stream."""

    before: RMSNorm | None
    after: RMSNorm | None
    scale: float = 1.0

    def enter(self, x: Tensor, residual: Tensor | None, step: StepInputs) -> tuple[Tensor, Tensor]:
        """Return the layer's input and the residual stream.

        Args:
            x: the output of the branch before, not yet added to the residual stream; or the embeddings.
            residual: the residual stream; None in the first branch of a model.
            step: the inputs of the step.
        """
        if self.before is not None:
            return self.before.add(x, residual, step)
        total = x if residual is None else step.ops.add(x, residual)
        return total, total

    def leave(self, x: Tensor, step: StepInputs) -> Tensor:
        """Return the layer's output with norm and scale applied, ready to be added."""
        if self.after is not None:
            x = self.after(x, step)
        return x if self.scale == 1 else step.ops.scale(x, self.scale)


@dataclass(frozen=True, slots=True)
class DecoderBlock:
    """Attention, then the feed-forward layer, each in its own branch."""

    attention_branch: Branch
    attention: Attention
    mlp_branch: Branch
    mlp: FeedForward

    @classmethod
    def load(
        cls, load: Loader, blueprint: Blueprint, layer: int, feed_forward: LoadFeedForward
    ) -> DecoderBlock:
        """Read block ``layer``."""
        names = blueprint.names
        name = names.block_path(layer)

        def norm(part: str) -> RMSNorm:
            return load.norm(
                f"{name}.{part}", blueprint.hidden, blueprint.norm_eps, offset=blueprint.norm_offset
            )

        def branch(which: int) -> Branch:
            before = None if blueprint.block_norms == "after" else norm(names.norms_before[which])
            after = None if blueprint.block_norms == "before" else norm(names.norms_after[which])
            return Branch(before, after, blueprint.residual_scale)

        return cls(
            branch(0),
            load_attention(load, blueprint, f"{name}.{names.attention}", layer),
            branch(1),
            feed_forward(f"{name}.{names.feed_forward}", layer),
        )

    def __call__(
        self,
        x: Tensor,  # [T, E]: the output of the block before, not yet added
        residual: Tensor | None,  # [T, E]: the residual stream
        rows: Sequence[RotaryRows],
        step: StepInputs,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_branch.enter(x, residual, step)
        x = self.attention_branch.leave(self.attention(x, rows, step), step)
        x, residual = self.mlp_branch.enter(x, residual, step)
        return self.mlp_branch.leave(self.mlp(x, step), step), residual


@dataclass(frozen=True, slots=True)
class DecoderTrunk:
    """The network that a `Blueprint` describes, without its head."""

    embedding: Embedding
    rotaries: tuple[Rotary, ...]
    blocks: tuple[DecoderBlock, ...]
    norm: RMSNorm

    @classmethod
    def load(
        cls,
        load: Loader,
        blueprint: Blueprint,
        max_length: int,
        feed_forward: LoadFeedForward | None = None,
    ) -> DecoderTrunk:
        """Read a network for sequences of up to ``max_length`` tokens.

        Args:
            load: reads and packs the tensors.
            blueprint: sizes, options and tensor names.
            max_length: the number of positions in the tables of the rotary embeddings.
            feed_forward: reads the feed-forward layer of a block; by default a `GatedMLP`.
        """
        if feed_forward is None:
            feed_forward = gated_mlps(load, blueprint)
        vocabulary, hidden, names = blueprint.vocabulary, blueprint.hidden, blueprint.names
        tied_head = names.head if blueprint.tied_head else None
        table = load.table(names.embedding_path, vocabulary, hidden, tied_head=tied_head)
        scale = float(torch.tensor(blueprint.embedding_scale, dtype=load.dtype))
        return DecoderTrunk(
            Embedding(table, scale),
            tuple(Rotary(rotary, max_length, load.device) for rotary in blueprint.rotaries),
            tuple(DecoderBlock.load(load, blueprint, i, feed_forward) for i in range(blueprint.layers)),
            load.norm(names.norm_path, hidden, blueprint.norm_eps, offset=blueprint.norm_offset),
        )

    @property
    def length_dependent(self) -> bool:
        """Whether keys depend on the length of the sequence; prompts then cannot share prefixes."""
        return any(rotary.length_dependent for rotary in self.rotaries)

    def bidirectional(self) -> DecoderTrunk:
        """Return the trunk with attention that also sees later keys, for steps without a KV cache."""
        blocks = (
            replace(block, attention=replace(block.attention, is_causal=False)) for block in self.blocks
        )
        return DecoderTrunk(self.embedding, self.rotaries, tuple(blocks), self.norm)

    def __call__(
        self, tokens: Tensor, step: StepInputs, input_embeds: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """``tokens [T]`` -> hidden states ``[T, E]`` before and after the final norm."""
        x, residual = self.embedding(tokens, step, input_embeds), None  # [T, E]
        rows = [rotary.rows(step) for rotary in self.rotaries]
        for block in self.blocks:
            x, residual = block(x, residual, rows, step)
            beat()
        normed, hidden = self.norm.add(x, residual, step)
        return hidden, normed


@dataclass(frozen=True, slots=True)
class DecoderNetwork(DecoderTrunk):
    """The network that a `Blueprint` describes."""

    head: Head

    @classmethod
    def load(
        cls,
        load: Loader,
        blueprint: Blueprint,
        max_length: int,
        feed_forward: LoadFeedForward | None = None,
    ) -> DecoderNetwork:
        """Read a network with its head; see `DecoderTrunk.load`."""
        trunk = DecoderTrunk.load(load, blueprint, max_length, feed_forward)
        tied_to = trunk.embedding.table if blueprint.tied_head else None
        head = Head(
            load.head(blueprint.names.head, blueprint.vocabulary, blueprint.hidden, tied_to=tied_to),
            blueprint.logit_scale,
            blueprint.logit_soft_cap,
        )
        return cls(trunk.embedding, trunk.rotaries, trunk.blocks, trunk.norm, head)


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


def load_attention(load: Loader, blueprint: Blueprint, name: str, layer: int) -> Attention:
    """Read the attention of block ``layer``; ``name`` is its full name in the checkpoint."""
    hidden, heads, kv_heads, dim = blueprint.hidden, blueprint.heads, blueprint.kv_heads, blueprint.head_dim
    names, sizes = blueprint.names, (heads * dim, kv_heads * dim, kv_heads * dim)
    value_path, values = f"{name}.{names.values}", None
    if names.values is None:
        parts = {names.qkv[0]: sum(sizes)}
    else:
        parts = dict(zip(names.qkv, sizes, strict=True))
        if load.has_separate_values(value_path, parts[names.values], hidden):
            values = load.values(value_path, parts.pop(names.values), hidden, bias=blueprint.qkv_bias)
    return Attention(
        load.fused(name, parts, hidden, bias=blueprint.qkv_bias),
        load.linear(f"{name}.{names.output}", hidden, heads * dim, bias=blueprint.output_bias),
        layer,
        heads,
        kv_heads,
        dim,
        blueprint.attention_scale,
        blueprint.rotary_of_layer[layer],
        blueprint.attention_soft_cap,
        _head_norm(load, blueprint, f"{name}.{names.query_norm}", heads),
        _head_norm(load, blueprint, f"{name}.{names.key_norm}", kv_heads),
        load.tensor(f"{name}.{names.sinks}", heads) if blueprint.sinks else None,
        values,
        window=blueprint.windows[layer],
    )


def _head_norm(load: Loader, blueprint: Blueprint, name: str, heads: int) -> RMSNorm | None:
    if blueprint.head_norms is None:
        return None
    size = blueprint.head_dim * (heads if blueprint.head_norms == "together" else 1)
    return load.norm(name, size, blueprint.norm_eps, offset=blueprint.norm_offset)
