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
from penstock.nn.block_parts import BlockParts, FeedForward, llama_parts
from penstock.nn.blueprint import Blueprint
from penstock.nn.embedding import Embedding
from penstock.nn.head import Head
from penstock.nn.loader import Loader
from penstock.nn.norm import Norm
from penstock.nn.rotary import Rotary, RotaryRows


class Block(Protocol):
    """A decoder block: attention and a feed-forward layer."""

    @property
    def attention(self) -> Attention:
        """The attention of the block."""
        ...

    def with_attention(self, attention: Attention) -> Block:
        """Return a copy of the block with the given attention."""
        ...

    def __call__(
        self, x: Tensor, residual: Tensor | None, rows: Sequence[RotaryRows], step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """Return the block's output, not yet added to the residual stream, and the stream, ``[T, E]`` each.

        The next block or the final norm adds the output to the residual stream, because addition and norm are
        one fused operation. ``x`` and ``residual`` are the results of the previous block. The first block
        receives the embeddings and None.
        """
        ...


LoadBlock: TypeAlias = Callable[[int], Block]
"""Reads a block, given its number."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A residual branch: the norms before and after a layer, and the scale of the layer's output."""

    norm_before: Norm | None
    norm_after: Norm | None
    scale: float = 1.0

    def enter(self, x: Tensor, residual: Tensor | None, step: StepInputs) -> tuple[Tensor, Tensor]:
        """Return the layer's input and the residual stream.

        Args:
            x: the output of the previous branch, not yet added to the residual stream; or the embeddings.
            residual: the residual stream; None in the first branch of a model.
            step: the inputs of the step.
        """
        if self.norm_before is not None:
            return self.norm_before.add(x, residual, step)
        total = x if residual is None else step.ops.add(x, residual)
        return total, total

    def leave(self, x: Tensor, step: StepInputs) -> Tensor:
        """Return the layer's output with norm and scale applied.

        The caller adds the output to the residual stream.
        """
        if self.norm_after is not None:
            x = self.norm_after(x, step)
        return x if self.scale == 1 else step.ops.scale(x, self.scale)


@dataclass(frozen=True, slots=True)
class DecoderBlock:
    """Attention, then the feed-forward layer, each in its own residual branch."""

    attention_branch: Branch
    attention: Attention
    mlp_branch: Branch
    mlp: FeedForward

    @classmethod
    def load(cls, load: Loader, blueprint: Blueprint, layer: int, parts: BlockParts) -> DecoderBlock:
        """Read block ``layer``."""
        names = blueprint.names
        name = names.block_path(layer)

        def norm(part: str) -> Norm:
            return parts.norm(f"{name}.{part}", blueprint.hidden)

        def branch(index: int) -> Branch:
            before = None if blueprint.block_norms == "after" else norm(names.norms_before[index])
            after = None if blueprint.block_norms == "before" else norm(names.norms_after[index])
            return Branch(before, after, blueprint.residual_scale)

        return cls(
            branch(0),
            parts.attention(f"{name}.{names.attention}", layer),
            branch(1),
            parts.feed_forward(f"{name}.{names.feed_forward}", layer),
        )

    def with_attention(self, attention: Attention) -> DecoderBlock:
        """Return a copy of the block with the given attention."""
        return replace(self, attention=attention)

    def __call__(
        self,
        x: Tensor,  # [T, E]: the output of the previous block, not yet added
        residual: Tensor | None,  # [T, E]: the residual stream
        rows: Sequence[RotaryRows],
        step: StepInputs,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_branch.enter(x, residual, step)
        x = self.attention_branch.leave(self.attention(x, rows, step), step)
        x, residual = self.mlp_branch.enter(x, residual, step)
        return self.mlp_branch.leave(self.mlp(x, step), step), residual


@dataclass(frozen=True, slots=True)
class ParallelBlock:
    """Attention and feed-forward layer in parallel: ``x + attention(norm(x)) + mlp(norm(x))``.

    The feed-forward layer can have a separate norm (Wang and Komatsuzaki 2021, GPT-J).
    """

    norm: Norm
    attention: Attention
    mlp_norm: Norm | None
    mlp: FeedForward

    @classmethod
    def load(
        cls, load: Loader, blueprint: Blueprint, layer: int, parts: BlockParts, *, num_norms: int = 1
    ) -> ParallelBlock:
        """Read block ``layer``. ``num_norms`` is 2 if the feed-forward layer has its own norm, else 1."""
        names = blueprint.names
        name = names.block_path(layer)
        norm, mlp_norm = (f"{name}.{part}" for part in names.norms_before)
        return cls(
            parts.norm(norm, blueprint.hidden),
            parts.attention(f"{name}.{names.attention}", layer),
            parts.norm(mlp_norm, blueprint.hidden) if num_norms == 2 else None,
            parts.feed_forward(f"{name}.{names.feed_forward}", layer),
        )

    def with_attention(self, attention: Attention) -> ParallelBlock:
        """Return a copy of the block with the given attention."""
        return replace(self, attention=attention)

    def __call__(
        self, x: Tensor, residual: Tensor | None, rows: Sequence[RotaryRows], step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        normalized, residual = self.norm.add(x, residual, step)
        attention_output = self.attention(normalized, rows, step)
        if self.mlp_norm is not None:
            normalized = self.mlp_norm(residual, step)
        return step.ops.add(attention_output, self.mlp(normalized, step)), residual


@dataclass(frozen=True, slots=True)
class DecoderTrunk:
    """The network that a `Blueprint` describes, without its head."""

    embedding: Embedding
    rotaries: tuple[Rotary, ...]
    blocks: tuple[Block, ...]
    norm: Norm

    @classmethod
    def load(
        cls,
        load: Loader,
        blueprint: Blueprint,
        max_length: int,
        parts: BlockParts | None = None,
        block: LoadBlock | None = None,
    ) -> DecoderTrunk:
        """Read a network for sequences of up to ``max_length`` tokens.

        Args:
            load: reads and packs the tensors.
            blueprint: sizes, options and tensor names.
            max_length: the number of positions in the tables of the rotary embeddings.
            parts: functions that load the parts of the blocks and the final norm; by default `llama_parts`.
            block: loads a block; by default a `DecoderBlock` with ``parts``.
        """
        parts = parts or llama_parts(load, blueprint)
        block = block or (lambda layer: DecoderBlock.load(load, blueprint, layer, parts))
        vocab_size, hidden, names = blueprint.vocab_size, blueprint.hidden, blueprint.names
        tied_head = names.head if blueprint.tied_head else None
        table = load.table(names.embedding_path, vocab_size, hidden, tied_head=tied_head)
        scale = float(torch.tensor(blueprint.embedding_scale, dtype=load.dtype))
        return DecoderTrunk(
            load_embedding(load, table, vocab_size, scale),
            tuple(Rotary(rotary, max_length, load.device) for rotary in blueprint.rotaries),
            tuple(block(layer) for layer in range(blueprint.layers)),
            parts.norm(names.norm_path, hidden),
        )

    @property
    def is_length_dependent(self) -> bool:
        """Whether keys depend on the length of the sequence, as in dynamic NTK and LongRoPE."""
        return any(rotary.is_length_dependent for rotary in self.rotaries)

    def bidirectional(self) -> DecoderTrunk:
        """Return the trunk with bidirectional attention, for steps without a KV cache."""
        blocks = (block.with_attention(replace(block.attention, is_causal=False)) for block in self.blocks)
        return DecoderTrunk(self.embedding, self.rotaries, tuple(blocks), self.norm)

    def __call__(
        self, tokens: Tensor, step: StepInputs, input_embeds: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """``tokens [T]`` -> hidden states ``[T, E]`` before and after the final norm.

        ``input_embeds`` has the indices ``[P]`` of rows and their embeddings ``[P, E]``, which replace the
        embeddings of the tokens.
        """
        x, residual = self.embedding(tokens, step, input_embeds), None  # [T, E]
        rows = [rotary.rows(step) for rotary in self.rotaries]
        for block in self.blocks:
            x, residual = block(x, residual, rows, step)
            beat()
        normalized, hidden = self.norm.add(x, residual, step)
        return hidden, normalized


@dataclass(frozen=True, slots=True)
class DecoderNetwork(DecoderTrunk):
    """The network that a `Blueprint` describes, with its head."""

    head: Head

    @classmethod
    def load(
        cls,
        load: Loader,
        blueprint: Blueprint,
        max_length: int,
        parts: BlockParts | None = None,
        block: LoadBlock | None = None,
        *,
        head_bias: bool = False,
    ) -> DecoderNetwork:
        """Read a network with its head; see `DecoderTrunk.load`."""
        trunk = DecoderTrunk.load(load, blueprint, max_length, parts, block)
        tied_to = trunk.embedding.table if blueprint.tied_head else None
        name, sizes = blueprint.names.head, (blueprint.vocab_size, blueprint.hidden)
        head = Head(
            load.head(name, *sizes, tied_to=tied_to, bias=head_bias),
            blueprint.logit_scale,
            blueprint.logit_soft_cap,
        )
        return cls(trunk.embedding, trunk.rotaries, trunk.blocks, trunk.norm, head)


def load_embedding(load: Loader, table: Tensor, vocab_size: int, scale: float = 1.0) -> Embedding:
    """Return the embedding of a table that `Loader.table` has read.

    Args:
        load: the loader that has read the table.
        table: this rank's rows.
        vocab_size: V, the number of rows of the whole table.
        scale: see `Embedding`.
    """
    return Embedding(table, scale, load.shard.collectives, load.shard.vocabulary(vocab_size).start)
