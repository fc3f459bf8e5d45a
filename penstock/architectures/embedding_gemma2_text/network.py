"""The network of EmbeddingGemma 2: blocks of Gemma 4 with bidirectional attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.architectures.gemma4_text.network import Gemma4Block
from penstock.host.heartbeat import beat
from penstock.kernels import StepInputs
from penstock.nn import Embedding, Linear, RMSNorm, Rotary, RotaryRows


@dataclass(frozen=True, slots=True)
class NormedAttention:
    """Bidirectional attention with norms of queries, keys and values, and unscaled scores."""

    qkv: Linear  # [E] -> [(H + 2K) D]
    output: Linear  # [H D] -> [E]
    heads: int
    kv_heads: int
    head_dim: int
    q_norm: RMSNorm
    k_norm: RMSNorm
    v_norm: RMSNorm
    rotary_index: int
    """The index of the rotary embedding for queries and keys."""
    window: int | None
    """The largest distance in tokens from a query to a visible key, in each direction; None for no limit."""

    def __call__(self, x: Tensor, rows: Sequence[RotaryRows], step: StepInputs) -> Tensor:
        """``x [T, E] -> [T, E]``; ``rows`` are the cosines and sines of each rotary embedding."""
        qk_heads = self.heads + self.kv_heads
        heads = self.qkv(x, step).view(-1, qk_heads + self.kv_heads, self.head_dim)
        q = self.q_norm(heads[:, : self.heads], step)
        k = self.k_norm(heads[:, self.heads : qk_heads], step)
        v = self.v_norm(heads[:, qk_heads:], step)
        q, k = step.ops.rotary(q, k, *rows[self.rotary_index])
        out = step.ops.encoder_attention(
            q, k, v, step.row_offsets, scale=1.0, window=self.window, blocks=step.blocks
        )
        return self.output(out.view(-1, self.heads * self.head_dim), step)


@dataclass(frozen=True, slots=True)
class EmbeddingGemma2Network:
    """Token embeddings, their projection to per-layer embeddings, blocks, a norm and an output projection."""

    embedding: Embedding
    layer_input_projection: Linear  # [E] -> [L P]
    layer_input_scale: float
    layer_input_norm: RMSNorm  # [P]
    rotaries: tuple[Rotary, ...]
    blocks: tuple[Gemma4Block, ...]
    norm: RMSNorm
    projection: Linear  # [E] -> [embedding_dim]
    classifier: None = None
    masked_lm_head: None = None

    @property
    def is_length_dependent(self) -> bool:
        """Whether the angles of a rotary embedding depend on the sequence length."""
        return any(rotary.is_length_dependent for rotary in self.rotaries)

    def __call__(self, tokens: Tensor, step: StepInputs, token_types: Tensor | None = None) -> Tensor:
        """``tokens [T]`` -> hidden states ``[T, embedding_dim]``; the family has no token types."""
        x = self.embedding(tokens, step)
        projected = step.ops.scale(self.layer_input_projection(x, step), self.layer_input_scale)
        projected = projected.view(len(x), len(self.blocks), -1)  # [T, L, P]
        layer_embeddings = self.layer_input_norm(projected, step)
        rows = [rotary.rows(step) for rotary in self.rotaries]
        for layer, block in enumerate(self.blocks):
            x = block(x, layer_embeddings[:, layer], rows, step)
            beat()
        return self.projection(self.norm(x, step), step)
