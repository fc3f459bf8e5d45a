"""Multi-head attention with grouped keys and values, over the paged cache or within whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from penstock.kernels import StepInputs
from penstock.nn.linear import Linear
from penstock.nn.norm import Norm
from penstock.nn.rotary import RotaryRows


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245).

    Query head h reads kv head ``h // (H / K)``. With a KV cache, attention is causal except within
    ``step.spans``, `soft_cap` and `sinks` apply, and the sliding window is an option of the layer's cache
    group. Without a KV cache, the step contains whole sequences, and `window` and `is_causal` apply.
    """

    is_qkv_per_head: ClassVar[bool] = False
    """Whether `qkv` stores query, key and value of head 0, then query, key and value of head 1, and so on."""

    qkv: Linear  # [E] -> [(H + 2K) D]; [(H + K) D] if values have a separate layer
    output: Linear  # [H D] -> [E]
    layer: int  # the layer's index in the KV cache
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rotary_index: int | None = 0
    """The index of the rotary embedding for queries and keys; None for no rotation."""
    soft_cap: float | None = None
    """Attention scores become ``soft_cap * tanh(score / soft_cap)``; None for no cap. Needs a KV cache."""
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    """Norms of queries and keys, applied before the rotation.

    A norm is computed for each head separately or for all heads together. Separate norms have weights ``[D]``
    if heads share the weights, otherwise ``[H, D]`` and ``[K, D]``. Norms of all heads together have weights
    ``[H D]`` and ``[K D]``.
    """
    sinks: Tensor | None = None  # [H]: an extra logit of each head in the softmax; needs a KV cache
    values: Linear | None = None  # [E] -> [K D]: the value projection, if it is not a part of `qkv`
    window: int | None = None
    """The number of keys in each direction to which a query attends, including its own. Not used with a KV
    cache.
    """
    is_causal: bool = True
    """Whether attention is causal. Not used with a KV cache."""
    is_interleaved: bool = False
    """Whether the rotary embedding rotates the pairs (2 i, 2 i + 1) of a head."""
    is_causal_in_spans: bool = False
    """Whether attention is causal also within ``step.spans``."""

    def __call__(self, x: Tensor, rows: Sequence[RotaryRows], step: StepInputs) -> Tensor:
        """Return the output ``[T, E]`` for ``x [T, E]``.

        ``rows`` are the cosines and sines of the tokens, for each rotary embedding.
        """
        q, k, v = self._project(x, step)
        q, k = self._normalize_and_rotate(q, k, rows, step)
        out = self._attend(q, k, v, step)
        return self.output(out.view(-1, self.heads * self.head_dim), step)

    def _normalize_and_rotate(
        self, q: Tensor, k: Tensor, rows: Sequence[RotaryRows], step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """Return queries ``[T, H, D]`` and keys ``[T, K, D]`` with norms and rotary embedding applied."""
        q, k = self._apply_norm(q, self.q_norm, step), self._apply_norm(k, self.k_norm, step)
        return self._rotate(q, k, rows, step)

    def _rotate(
        self, q: Tensor, k: Tensor, rows: Sequence[RotaryRows], step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        if self.rotary_index is None:
            return q, k
        return step.ops.rotary(q, k, *rows[self.rotary_index], is_interleaved=self.is_interleaved)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, step: StepInputs) -> Tensor:
        """Return the attention output ``[T, H, D]`` of ``q [T, H, D]``, ``k [T, K, D]``, ``v [T, K, D]``."""
        if step.kv is None:
            window = None if self.window is None else self.window - 1
            return step.ops.encoder_attention(
                q,
                k,
                v,
                step.row_offsets,
                scale=self.scale,
                window=window,
                is_causal=self.is_causal,
                blocks=step.blocks,
            )
        step.ops.store_kv(k, v, step.kv.layer(self.layer))
        return self._attend_to_cache(q, step)

    def _attend_to_cache(self, q: Tensor, step: StepInputs) -> Tensor:
        """Return the attention output ``[T, H, D]`` of ``q [T, H, D]``, with the stored keys and values."""
        assert step.kv is not None
        return step.ops.attention(
            q,
            step.kv.layer(self.layer),
            step.row_offsets,
            step.kv.lengths,
            scale=self.scale,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            spans=None if self.is_causal_in_spans else step.spans,
        )

    def _project(self, x: Tensor, step: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``[T, H, D]``, keys and values ``[T, K, D]`` of ``x [T, E]``, as views."""
        qk_heads = self.heads + self.kv_heads
        if self.values is None:
            heads = self.qkv(x, step).view(-1, qk_heads + self.kv_heads, self.head_dim)
            v = heads[:, qk_heads:]
        else:
            heads = self.qkv(x, step).view(-1, qk_heads, self.head_dim)
            v = self.values(x, step).view(-1, self.kv_heads, self.head_dim)
        return heads[:, : self.heads], heads[:, self.heads : qk_heads], v

    def _apply_norm(
        self, heads: Tensor, norm: Norm | None, step: StepInputs
    ) -> Tensor:  # [T, H, D] -> [T, H, D]
        if norm is None:
            return heads
        if norm.weight.shape[-1] == self.head_dim:
            return norm(heads, step)
        return norm(heads.flatten(1), step).view(heads.shape)
