"""Layers of bidirectional encoders: attention without a KV cache, and blocks with norms as in BERT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels import StepInputs
from penstock.nn.linear import Linear
from penstock.nn.mlp import MLP, GatedMLP
from penstock.nn.norm import LayerNorm
from penstock.nn.rotary import RotaryRows


@dataclass(frozen=True, slots=True)
class EncoderAttention:
    """Bidirectional attention within each sequence; query head h reads kv head ``h // (H / K)``."""

    qkv: Linear  # [E] -> [(H + 2K) D]
    output: Linear  # [H D] -> [E]
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    """The largest distance in tokens from a query to a visible key, in each direction; None for no limit."""
    rotary_index: int | None = None
    """The index of the rotary embedding for queries and keys; None for no rotation."""

    def __call__(
        self, x: Tensor, step: StepInputs, rows: Sequence[RotaryRows] = (), bias: Tensor | None = None
    ) -> Tensor:
        """``x [T, E] -> [T, E]``; ``bias [H, 2P - 1]`` is the relative bias of `Ops.encoder_attention`."""
        qk_heads = self.heads + self.kv_heads
        heads = self.qkv(x, step).view(-1, qk_heads + self.kv_heads, self.head_dim)
        q, k, v = heads[:, : self.heads], heads[:, self.heads : qk_heads], heads[:, qk_heads:]
        if self.rotary_index is not None:
            q, k = step.ops.rotary(q, k, *rows[self.rotary_index])
        out = step.ops.encoder_attention(
            q, k, v, step.row_offsets, scale=self.scale, window=self.window, bias=bias, blocks=step.blocks
        )
        return self.output(out.view(-1, self.heads * self.head_dim), step)


@dataclass(frozen=True, slots=True)
class PostNormBlock:
    """Attention, then the feed-forward layer. A norm follows each residual connection, as in BERT."""

    attention: EncoderAttention
    attention_norm: LayerNorm
    mlp: MLP | GatedMLP
    mlp_norm: LayerNorm

    def __call__(
        self, x: Tensor, step: StepInputs, rows: Sequence[RotaryRows] = (), bias: Tensor | None = None
    ) -> Tensor:
        """``x [T, E] -> [T, E]``."""
        x = self.attention_norm.normalize_sum(self.attention(x, step, rows, bias), x, step)
        return self.mlp_norm.normalize_sum(self.mlp(x, step), x, step)
