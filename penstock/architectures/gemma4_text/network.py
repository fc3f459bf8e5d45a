"""The network of Gemma 4: blocks with per-layer embeddings, shared keys and values, and experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.host.heartbeat import beat
from penstock.kernels import Activation, StepInputs
from penstock.nn import (
    Attention,
    Embedding,
    Experts,
    GatedMLP,
    Head,
    Linear,
    Norm,
    RMSNorm,
    Rotary,
    RotaryRows,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Attention(Attention):
    """Attention with norms of queries, keys and values, and unscaled scores.

    `qkv` computes

    - only queries with `is_kv_shared`,
    - queries and keys with `are_values_keys`, or if values have a separate layer,
    - otherwise queries, keys and values.
    """

    v_norm: RMSNorm
    are_values_keys: bool = False
    """Whether values are computed from the output of the key projection."""
    is_kv_shared: bool = False
    """Whether the layer attends to keys and values that an earlier layer has stored."""

    def __call__(self, x: Tensor, rows: Sequence[RotaryRows], step: StepInputs) -> Tensor:
        if self.is_kv_shared:
            queries = self.qkv(x, step).view(len(x), self.heads, self.head_dim)
            q = self._apply_norm(queries, self.q_norm, step)
            q, _ = self._rotate(q, q[:, :0], rows, step)
            out = self._attend_to_cache(q, step)
        else:
            q, k, v = self._project(x, step)
            v = self.v_norm(v, step)
            q, k = self._normalize_and_rotate(q, k, rows, step)
            out = self._attend(q, k, v, step)
        return self.output(out.view(len(x), self.heads * self.head_dim), step)

    def _project(self, x: Tensor, step: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        if not self.are_values_keys:
            return Attention._project(self, x, step)
        heads = self.qkv(x, step).view(len(x), self.heads + self.kv_heads, self.head_dim)
        keys = heads[:, self.heads :]
        return heads[:, : self.heads], keys, keys


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A router with its norm and experts, which are parallel to the MLP of a block."""

    router_norm: RMSNorm
    """The norm of the router's input. Its weights contain the router's scale."""
    norms: tuple[Norm, Norm]
    """The norms before and after the experts."""
    experts: Experts
    mlp_norm: Norm
    """The norm after the MLP."""

    def __call__(self, x: Tensor, mlp_output: Tensor, step: StepInputs) -> Tensor:
        """Return the sum of the normalized outputs of the MLP and the experts, ``[T, E]``.

        ``x [T, E]`` is the residual stream before the feed-forward layer.
        """
        before, after = self.norms
        y = self.experts.mix(self.router_norm(x, step), before(x, step), step)
        return step.ops.add(self.mlp_norm(mlp_output, step), after(y, step))


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Computes the additional input of a block: ``norm(project(activation(gate(x)) * layer_embeddings))``.

    P is the size of a per-layer embedding.
    """

    gate: Linear  # [E] -> [P]
    project: Linear  # [P] -> [E]
    norm: Norm
    activation: Activation

    def __call__(self, x: Tensor, layer_embeddings: Tensor, step: StepInputs) -> Tensor:
        """``x [T, E] -> [T, E]``; ``layer_embeddings [T, P]`` are the block's per-layer embeddings."""
        gated = step.ops.activation(self.gate(x, step), self.activation)
        return self.norm(self.project(step.ops.multiply(gated, layer_embeddings), step), step)


@dataclass(frozen=True, slots=True)
class Gemma4Block:
    """Attention, feed-forward layer and per-layer input, each with norms. The block scales its output."""

    attention_norms: tuple[Norm, Norm]
    attention: Callable[[Tensor, Sequence[RotaryRows], StepInputs], Tensor]
    mlp_norms: tuple[Norm, Norm]
    mlp: GatedMLP
    experts: ExpertLayer | None
    layer_input: LayerInput | None
    output_scale: float

    def __call__(
        self, x: Tensor, per_layer: Tensor | None, rows: Sequence[RotaryRows], step: StepInputs
    ) -> Tensor:
        """``x [T, E]`` and the block's per-layer embeddings ``[T, P]``, if any -> ``[T, E]``."""
        before, after = self.attention_norms
        attended = after(self.attention(before(x, step), rows, step), step)
        before, after = self.mlp_norms
        normalized, x = before.add(attended, x, step)
        y = self.mlp(normalized, step)
        if self.experts is not None:
            y = self.experts(x, y, step)
        x = step.ops.add(after(y, step), x)
        if self.layer_input is not None:
            assert per_layer is not None
            x = step.ops.add(self.layer_input(x, per_layer, step), x)
        return x if self.output_scale == 1 else step.ops.scale(x, self.output_scale)


@dataclass(frozen=True, slots=True)
class PerLayerEmbedding:
    """Computes the additional inputs of all blocks from token ids and embeddings."""

    embedding: Embedding  # [T] -> [T, L P]
    projection: Linear  # [E] -> [L P]
    projection_scale: float
    norm: Norm  # [P]
    layers: int

    def __call__(self, tokens: Tensor, x: Tensor, step: StepInputs) -> Tensor:
        """Return the per-layer embeddings ``[T, L, P]`` of ``tokens [T]`` with embeddings ``x [T, E]``."""
        ops = step.ops
        projected = ops.scale(self.projection(x, step), self.projection_scale)
        projected = self.norm(projected.view(len(x), self.layers, -1), step)
        total = ops.add(projected.view(len(x), -1), self.embedding(tokens, step))
        return ops.scale(total, 2**-0.5).view(len(x), self.layers, -1)


@dataclass(frozen=True, slots=True)
class Gemma4Network:
    """Embedding, per-layer embeddings, blocks, final norm and head."""

    embedding: Embedding
    per_layer: PerLayerEmbedding | None
    rotaries: tuple[Rotary, ...]
    blocks: tuple[Gemma4Block, ...]
    norm: Norm
    head: Head
    embedded_ids: Tensor | None = None  # [V, 1] int64
    """The token id whose embeddings are used for each token id: placeholders of media have the embeddings of
    the padding token. None for a model without media."""

    @property
    def is_length_dependent(self) -> bool:
        """Whether the angles of a rotary embedding depend on the sequence length."""
        return any(rotary.is_length_dependent for rotary in self.rotaries)

    def __call__(
        self, tokens: Tensor, step: StepInputs, input_embeds: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """``tokens [T]`` -> hidden states ``[T, E]`` before and after the final norm.

        ``input_embeds`` has the indices ``[I]`` of rows and their embeddings ``[I, E]``, which replace the
        embeddings of the tokens.
        """
        if self.embedded_ids is not None:
            tokens = step.ops.embedding(tokens, self.embedded_ids).view(-1)
        x = self.embedding(tokens, step, input_embeds)  # [T, E]
        per_layer = None if self.per_layer is None else self.per_layer(tokens, x, step)
        rows = [rotary.rows(step) for rotary in self.rotaries]
        for layer, block in enumerate(self.blocks):
            x = block(x, None if per_layer is None else per_layer[:, layer], rows, step)
            beat()
        return x, self.norm(x, step)
