"""The network that most families share: embedding, blocks of attention and feed-forward layer, norm, head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """What a block does to each row alone: a gated layer, or experts."""

    def __call__(self, x: Tensor, step: StepInputs) -> Tensor:
        """``x [T, E] -> [T, E]``."""
        ...


LoadFeedForward: TypeAlias = Callable[[str, int], FeedForward]
"""Reads the feed-forward layer of a block: its name in the checkpoint, and which block."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Norms about a layer whose result is added to what it read."""

    before: RMSNorm | None
    after: RMSNorm | None
    scale: float = 1.0

    def enter(self, x: Tensor, residual: Tensor | None, step: StepInputs) -> tuple[Tensor, Tensor]:
        """What the layer reads, and the sum that its result will be added to.

        ``x`` is what the branch before has yet to add to ``residual``; the first of a model has none.
        """
        if self.before is not None:
            return self.before.add(x, residual, step)
        total = x if residual is None else step.ops.add(x, residual)
        return total, total

    def leave(self, x: Tensor, step: StepInputs) -> Tensor:
        """The layer's result as it is to be added."""
        if self.after is not None:
            x = self.after(x, step)
        return x if self.scale == 1 else step.ops.scale(x, self.scale)


@dataclass(frozen=True, slots=True)
class DecoderBlock:
    """Attention, then the feed-forward layer, each in a branch of its own."""

    attention_branch: Branch
    attention: Attention
    mlp_branch: Branch
    mlp: FeedForward

    @classmethod
    def load(
        cls, load: Loader, blueprint: Blueprint, layer: int, feed_forward: LoadFeedForward
    ) -> DecoderBlock:
        """Reads block ``layer``."""
        name = f"model.layers.{layer}"
        before, after = _NORMS[blueprint.block_norms]

        def branch(which: int) -> Branch:
            first, second = (
                None
                if names is None
                else load.norm(
                    f"{name}.{names[which]}",
                    blueprint.hidden,
                    blueprint.norm_eps,
                    offset=blueprint.norm_offset,
                )
                for names in (before, after)
            )
            return Branch(first, second, blueprint.residual_scale)

        return cls(
            branch(0),
            load_attention(load, blueprint, f"{name}.self_attn", layer),
            branch(1),
            feed_forward(f"{name}.mlp", layer),
        )

    def __call__(
        self,
        x: Tensor,  # [T, E]: what the block before has yet to add
        residual: Tensor | None,  # [T, E]: the sum before that
        rows: Sequence[RotaryRows],
        step: StepInputs,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_branch.enter(x, residual, step)
        x = self.attention_branch.leave(self.attention(x, rows, step), step)
        x, residual = self.mlp_branch.enter(x, residual, step)
        return self.mlp_branch.leave(self.mlp(x, step), step), residual


_NORMS = {  # before and after; of attention, then of the feed-forward layer
    "before": (("input_layernorm", "post_attention_layernorm"), None),
    "after": (None, ("post_attention_layernorm", "post_feedforward_layernorm")),
    "around": (
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
}


@dataclass(frozen=True, slots=True)
class DecoderNetwork:
    """A decoder-only transformer as its blueprint says."""

    embedding: Embedding
    rotaries: tuple[Rotary, ...]
    blocks: tuple[DecoderBlock, ...]
    norm: RMSNorm
    head: Head

    @classmethod
    def load(
        cls,
        load: Loader,
        blueprint: Blueprint,
        max_length: int,
        feed_forward: LoadFeedForward | None = None,
    ) -> DecoderNetwork:
        """Reads a network to run up to ``max_length``; feed-forward layers are gated ones if not given."""
        if feed_forward is None:
            feed_forward = gated_mlps(load, blueprint)
        vocabulary, hidden = blueprint.vocabulary, blueprint.hidden
        tied_head = "lm_head" if blueprint.tied_head else None
        table = load.table("model.embed_tokens", vocabulary, hidden, tied_head=tied_head)
        scale = float(torch.tensor(blueprint.embedding_scale, dtype=load.dtype))
        tied_to = table if blueprint.tied_head else None
        return cls(
            Embedding(table, scale),
            tuple(Rotary(rotary, max_length, load.device) for rotary in blueprint.rotaries),
            tuple(DecoderBlock.load(load, blueprint, i, feed_forward) for i in range(blueprint.layers)),
            load.norm("model.norm", hidden, blueprint.norm_eps, offset=blueprint.norm_offset),
            Head(
                load.head("lm_head", vocabulary, hidden, tied_to=tied_to),
                blueprint.logit_scale,
                blueprint.logit_soft_cap,
            ),
        )

    @property
    def length_dependent(self) -> bool:
        """Whether keys depend on the length of the text, so that prompts cannot share them."""
        return any(rotary.length_dependent for rotary in self.rotaries)

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


def gated_mlps(load: Loader, blueprint: Blueprint) -> LoadFeedForward:
    """Reads `GatedMLP` layers of a blueprint's sizes."""

    def read(name: str, layer: int) -> GatedMLP:
        return GatedMLP.load(
            load,
            name,
            blueprint.hidden,
            blueprint.inner,
            blueprint.activation,
            bias=blueprint.mlp_bias,
            fused=blueprint.fused_weights,
        )

    return read


def load_attention(load: Loader, blueprint: Blueprint, name: str, layer: int) -> Attention:
    """Reads the attention of block ``layer``, called ``name`` in the checkpoint."""
    hidden, heads, kv_heads, dim = blueprint.hidden, blueprint.heads, blueprint.kv_heads, blueprint.head_dim
    sizes, values = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}, None
    if blueprint.fused_weights:
        sizes = {"qkv_proj": sum(sizes.values())}
    elif load.has_separate_values(f"{name}.v_proj"):
        values = load.values(f"{name}.v_proj", sizes.pop("v_proj"), hidden, bias=blueprint.qkv_bias)
    return Attention(
        load.fused(name, sizes, hidden, bias=blueprint.qkv_bias),
        load.linear(f"{name}.o_proj", hidden, heads * dim, bias=blueprint.output_bias),
        layer,
        heads,
        kv_heads,
        dim,
        blueprint.attention_scale,
        blueprint.rotary_of_layer[layer],
        blueprint.attention_soft_cap,
        _head_norm(load, blueprint, f"{name}.q_norm", heads),
        _head_norm(load, blueprint, f"{name}.k_norm", kv_heads),
        load.tensor(f"{name}.sinks", heads) if blueprint.sinks else None,
        values,
    )


def _head_norm(load: Loader, blueprint: Blueprint, name: str, heads: int) -> RMSNorm | None:
    if blueprint.head_norms is None:
        return None
    size = blueprint.head_dim * (heads if blueprint.head_norms == "together" else 1)
    return load.norm(name, size, blueprint.norm_eps, offset=blueprint.norm_offset)
