"""`GatedAttention`: attention whose output is multiplied by the sigmoid of a gate, as in Qwen3-Next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels import StepInputs
from penstock.nn.attention import Attention
from penstock.nn.block_parts import rms_norms
from penstock.nn.blueprint import Blueprint
from penstock.nn.loader import Loader
from penstock.nn.rotary import RotaryRows


@dataclass(frozen=True, slots=True)
class GatedAttention(Attention):
    """Attention with an output gate (Qiu et al. 2025, arXiv:2505.06708).

    `qkv` computes ``[query, gate]`` of each head, then the keys, then the values unless they have a separate
    layer: ``[E] -> [(2H + 2K) D]`` or ``[(2H + K) D]``.
    """

    @classmethod
    def load(cls, load: Loader, blueprint: Blueprint, name: str, *, cache_layer: int) -> GatedAttention:
        """Read the layer called ``name``, whose index in the KV cache is ``cache_layer``."""
        hidden, heads, kv_heads, dim = (
            blueprint.hidden,
            blueprint.heads,
            blueprint.kv_heads,
            blueprint.head_dim,
        )
        names, norm = blueprint.names, rms_norms(load, blueprint)
        query, key, value = names.qkv
        sizes = {query: 2 * heads * dim, key: kv_heads * dim, value: kv_heads * dim}
        values = None
        value_path = f"{name}.{value}"
        if load.has_separate_values(value_path, sizes[value], hidden, fused_with=f"{name}.{query}"):
            values = load.values(value_path, sizes.pop(value), hidden, bias=blueprint.qkv_bias)
        return cls(
            load.fused(name, sizes, hidden, bias=blueprint.qkv_bias),
            load.linear(f"{name}.{names.output}", hidden, heads * dim, bias=blueprint.output_bias),
            cache_layer,
            heads,
            kv_heads,
            dim,
            blueprint.attention_scale,
            q_norm=norm(f"{name}.{names.query_norm}", dim),
            k_norm=norm(f"{name}.{names.key_norm}", dim),
            values=values,
        )

    def __call__(self, x: Tensor, rows: Sequence[RotaryRows], step: StepInputs) -> Tensor:
        heads = self.qkv(x, step).view(len(x), -1, self.head_dim)
        queries_and_gates = heads[:, : 2 * self.heads]
        queries, gates = queries_and_gates[:, ::2], queries_and_gates[:, 1::2]  # [T, H, D] each
        keys = heads[:, 2 * self.heads : 2 * self.heads + self.kv_heads]
        if self.values is None:
            values = heads[:, 2 * self.heads + self.kv_heads :]
        else:
            values = self.values(x, step).view(len(x), self.kv_heads, self.head_dim)
        q, k = self._normalize_and_rotate(queries, keys, rows, step)
        out = step.ops.apply_gate(self._attend(q, k, values, step), gates, "sigmoid")
        return self.output(out.view(len(x), -1), step)
