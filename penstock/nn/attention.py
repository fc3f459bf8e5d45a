"""Multi-head attention with grouped keys and values over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels import StepInputs
from penstock.nn.linear import Linear
from penstock.nn.loading import Loader
from penstock.nn.rotary import RotaryRows


@dataclass(frozen=True, slots=True)
class Attention:
    """Rotary attention; query head h reads kv head ``h // (H / K)`` (Ainslie et al. 2023, 2305.13245)."""

    qkv: Linear
    output: Linear
    layer: int  # its place in the KV cache
    heads: int
    kv_heads: int
    head_dim: int
    scale: float

    @classmethod
    def load(
        cls,
        load: Loader,
        name: str,
        *,
        layer: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool = False,
        output_bias: bool = False,
        scale: float | None = None,
    ) -> Attention:
        """Reads ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj`` under ``name``."""
        sizes = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        return cls(
            load.fused(name, sizes, hidden, bias=bias),
            load.linear(f"{name}.o_proj", hidden, heads * head_dim, bias=output_bias),
            layer,
            heads,
            kv_heads,
            head_dim,
            scale if scale is not None else head_dim**-0.5,
        )

    def __call__(self, x: Tensor, rows: RotaryRows, step: StepInputs) -> Tensor:  # [T, E] -> [T, E]
        assert step.kv is not None, "attention needs a KV cache"
        q, k, v = self._split(self.qkv(x, step))
        q, k = step.ops.rotary(q, k, *rows)
        kv = step.kv.layer(self.layer)
        step.ops.store_kv(k, v, kv)
        out = step.ops.attention(q, kv, step.row_offsets, step.kv.lengths, scale=self.scale)
        return self.output(out.view(-1, self.heads * self.head_dim), step)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the fused product: ``[T, H, D]``, ``[T, K, D]``, ``[T, K, D]``."""
        heads = qkv.view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        keys = self.heads + self.kv_heads
        return heads[:, : self.heads], heads[:, self.heads : keys], heads[:, keys:]
