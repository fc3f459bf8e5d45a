"""The operations that have C++ kernels; for types and layouts that these do not take, the reference's."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.cpu.experts import ACTIVATIONS, CpuExperts
from penstock.kernels.cpu.linear import LONG, TYPES
from penstock.kernels.experts import ClampedSwiGLU
from penstock.kernels.inputs import LayerKV, SamplingInputs
from penstock.kernels.ops import Activation, Routing

_CACHE_TYPES = {**TYPES, torch.int8: 2}
_SCALE, _SOFT_CAP = 4, 5  # functions beside the activations
_ROUTINGS = {"all": 0, "all_normed": 1, "chosen": 2}


_MAX_HEAD = 1024
"""Sums of more products of integers could leave 32 bits (csrc/attention_tile.inl)."""


class CpuOps(CpuExperts):
    """C++ kernels for float32 and bfloat16 activations.

    A row's bits depend on nothing but the row: not on its batch, its place there, or the threads.

    Args:
        kernels: those of one instruction set.
    """

    @property
    def isa(self) -> str:
        """The instruction set of the kernels."""
        return self._kernels.isa

    @property
    def description(self) -> str:
        return f"{self.name} {self.isa}"

    def embedding(self, tokens: Tensor, table: Tensor) -> Tensor:
        return self.take_rows(table, tokens)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        kind, weight_kind, strides = TYPES.get(x.dtype), TYPES.get(weight.dtype), x.stride()
        if kind is None or weight_kind is None or len(strides) not in (2, 3) or strides[-1] != 1:
            self._fall_back(
                "rms_norm",
                {
                    f"{x.dtype} activations": kind is not None,
                    f"{weight.dtype} weights": weight_kind is not None,
                    "this memory layout": len(strides) in (2, 3) and strides[-1] == 1,
                },
            )
            return super().rms_norm(x, weight, eps)
        out = self._empty(x.shape, x.dtype)
        *outer, inner, width = x.shape
        self._kernels.rms_norm(
            kind,
            weight_kind,
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            outer[0] if outer else 1,
            inner,
            strides[0],
            strides[-2],
            width,
            eps,
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        kind, weight_kind = TYPES.get(x.dtype), TYPES.get(weight.dtype)
        strides, residual_strides = x.stride(), residual.stride()
        fits = len(strides) == 2 and strides[1] == residual_strides[1] == 1 and x.dtype == residual.dtype
        if kind is None or weight_kind is None or not fits:
            self._fall_back(
                "add_rms_norm",
                {
                    f"{x.dtype} activations": kind is not None,
                    f"{weight.dtype} weights": weight_kind is not None,
                    "this memory layout or mixed types": fits,
                },
            )
            return super().add_rms_norm(x, residual, weight, eps)
        normed, total = self._empty(x.shape, x.dtype), self._empty(x.shape, x.dtype)
        rows, width = x.shape
        self._kernels.add_rms_norm(
            kind,
            weight_kind,
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            normed.data_ptr(),
            total.data_ptr(),
            rows,
            strides[0],
            residual_strides[0],
            width,
            eps,
        )
        return normed, total

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        kind, q_strides, k_strides = TYPES.get(q.dtype), q.stride(), k.stride()
        tables = cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
        if kind is None or q_strides[2] != 1 or k_strides[2] != 1 or k.dtype != q.dtype or not tables:
            self._fall_back(
                "rotary",
                {
                    f"{q.dtype} activations": kind is not None,
                    "strided heads": q_strides[2] == k_strides[2] == 1,
                    f"{k.dtype} keys": k.dtype == q.dtype,
                    "tables that are not contiguous float32": tables,
                },
            )
            return super().rotary(q, k, cos, sin)
        q_out, k_out = self._empty(q.shape, q.dtype), self._empty(k.shape, k.dtype)
        rows, heads, dim = q.shape
        self._kernels.rotary(
            kind,
            q.data_ptr(),
            k.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            q_out.data_ptr(),
            k_out.data_ptr(),
            rows,
            heads,
            k.shape[1],
            dim,
            cos.shape[1],
            q_strides[0],
            q_strides[1],
            k_strides[0],
            k_strides[1],
        )
        return q_out, k_out

    def store_kv(self, k: Tensor, v: Tensor, kv: LayerKV) -> None:
        kind, k_strides, v_strides = TYPES.get(k.dtype), k.stride(), v.stride()
        cache, slots = kv.cache, kv.slots
        cache_kind = _CACHE_TYPES.get(cache.dtype)
        rows_fit = k_strides[2] == v_strides[2] == 1 and k.dtype == v.dtype
        if kind is None or cache_kind is None or not rows_fit or not cache.is_contiguous():
            self._fall_back(
                "store_kv",
                {
                    f"{k.dtype} keys": kind is not None,
                    f"a {cache.dtype} cache": cache_kind is not None,
                    "this memory layout": rows_fit and cache.is_contiguous(),
                },
            )
            super().store_kv(k, v, kv)
            return
        assert slots.dtype == torch.int64
        assert slots.is_contiguous()
        self._kernels.store_kv(
            kind,
            cache_kind,
            k.data_ptr(),
            v.data_ptr(),
            cache.data_ptr(),
            _scales_of(kv),
            slots.data_ptr(),
            k.shape[0],
            *cache.shape[1:],
            k_strides[0],
            k_strides[1],
            v_strides[0],
            v_strides[1],
        )

    def attention(
        self,
        q: Tensor,
        kv: LayerKV,
        row_offsets: Tensor,
        lengths: Tensor,
        *,
        scale: float,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        cache, tables, strides = kv.cache, kv.block_tables, q.stride()
        kind, cache_kind = TYPES.get(q.dtype), _CACHE_TYPES.get(cache.dtype)
        _, num_blocks, kv_heads, block_size, dim = cache.shape
        blocks_fit = block_size >= 16 and block_size & (block_size - 1) == 0 and cache.is_contiguous()
        rows_fit = dim % 8 == 0 and dim <= _MAX_HEAD and strides[2] == 1 and tables.stride(1) == 1
        if kind is None or cache_kind is None or not (blocks_fit and rows_fit):
            self._fall_back(
                "attention",
                {
                    f"{q.dtype} queries": kind is not None,
                    f"a {cache.dtype} cache": cache_kind is not None,
                    f"cache blocks of {block_size} tokens (a power of two, at least 16)": blocks_fit,
                    f"a head size of {dim} (a multiple of 8, at most {_MAX_HEAD})": dim % 8 == 0
                    and dim <= _MAX_HEAD,
                    "strided queries or block tables": strides[2] == tables.stride(1) == 1,
                },
            )
            return super().attention(q, kv, row_offsets, lengths, scale=scale, soft_cap=soft_cap, sinks=sinks)
        assert tables.dtype == row_offsets.dtype == lengths.dtype == torch.int32
        if sinks is not None:
            sinks = self._kept(sinks.float().contiguous())
        out = self._empty(q.shape, q.dtype)
        rows, heads, _ = q.shape
        long = rows * tables.shape[1] * block_size * heads * dim > LONG
        (self._kernels.long_attention if long else self._kernels.attention)(
            kind,
            cache_kind,
            q.data_ptr(),
            cache.data_ptr(),
            _scales_of(kv),
            out.data_ptr(),
            tables.data_ptr(),
            row_offsets.data_ptr(),
            lengths.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            lengths.shape[0],
            heads,
            num_blocks,
            kv_heads,
            block_size,
            dim,
            strides[0],
            strides[1],
            tables.stride(0),
            kv.window or 0,
            scale,
            soft_cap or 0.0,
        )
        return out

    def gated_activation(self, x: Tensor, activation: Activation) -> Tensor:
        kind, strides = TYPES.get(x.dtype), x.stride()
        if kind is None or len(strides) != 2 or strides[1] != 1:
            self._fall_back(
                "gated_activation",
                {
                    f"{x.dtype} activations": kind is not None,
                    "this memory layout": len(strides) == 2 and strides[1] == 1,
                },
            )
            return super().gated_activation(x, activation)
        rows, width = x.shape
        out = self._empty((rows, width // 2), x.dtype)
        self._kernels.gated_activation(
            kind,
            ACTIVATIONS[activation],
            x.data_ptr(),
            out.data_ptr(),
            rows,
            width // 2,
            strides[0],
        )
        return out

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        out = self._change(x, ACTIVATIONS[activation], 0.0)
        if out is None:
            self._fall_back("activation", _elementwise_conditions(x))
            return super().activation(x, activation)
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        out = self._change(x, _SCALE, factor)
        if out is None:
            self._fall_back("scale", _elementwise_conditions(x))
            return super().scale(x, factor)
        return out

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        out = self._change(x, _SOFT_CAP, cap)
        if out is None:
            self._fall_back("soft_cap", _elementwise_conditions(x))
            return super().soft_cap(x, cap)
        return out

    def _change(self, x: Tensor, function: int, factor: float) -> Tensor | None:
        """Each number of ``x [T, F]`` changed by itself; None for what is not the kernel's type or layout."""
        kind, strides = TYPES.get(x.dtype), x.stride()
        if kind is None or len(strides) != 2 or strides[1] != 1:
            return None
        out = self._empty(x.shape, x.dtype)
        self._kernels.change(kind, function, x.data_ptr(), out.data_ptr(), *x.shape, strides[0], factor)
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        kind, x_strides, y_strides = TYPES.get(x.dtype), x.stride(), y.stride()
        rows_fit = len(x_strides) == 2 and x_strides[1] == 1 and y_strides[-1] == 1
        if kind is None or not rows_fit or x.dtype != y.dtype or x.shape != y.shape:
            self._fall_back(
                "add",
                {
                    f"{x.dtype} activations": kind is not None,
                    "this memory layout": rows_fit,
                    "operands of different types or shapes": x.dtype == y.dtype and x.shape == y.shape,
                },
            )
            return super().add(x, y)
        out = self._empty(x.shape, x.dtype)
        pointers = (x.data_ptr(), y.data_ptr(), out.data_ptr())
        self._kernels.add(kind, *pointers, *x.shape, x_strides[0], y_strides[0])
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        kind, weight_kind, strides = TYPES.get(x.dtype), TYPES.get(weight.dtype), x.stride()
        weights_fit = weight_kind is not None and bias.dtype == weight.dtype
        weights_fit = weights_fit and weight.is_contiguous() and bias.is_contiguous()
        if kind is None or not weights_fit or len(strides) not in (2, 3) or strides[-1] != 1:
            self._fall_back(
                "layer_norm",
                {
                    f"{x.dtype} activations": kind is not None,
                    f"{weight.dtype} or strided weights": weights_fit,
                    "this memory layout": len(strides) in (2, 3) and strides[-1] == 1,
                },
            )
            return super().layer_norm(x, weight, bias, eps)
        out = self._empty(x.shape, x.dtype)
        *outer, inner, width = x.shape
        self._kernels.layer_norm(
            kind,
            weight_kind,
            x.data_ptr(),
            weight.data_ptr(),
            bias.data_ptr(),
            out.data_ptr(),
            outer[0] if outer else 1,
            inner,
            strides[0],
            strides[-2],
            width,
            eps,
        )
        return out

    def clamped_swiglu(self, x: Tensor, gate: ClampedSwiGLU) -> Tensor:
        kind, strides = TYPES.get(x.dtype), x.stride()
        if kind is None or len(strides) != 2 or strides[1] != 1:
            self._fall_back(
                "clamped_swiglu",
                {
                    f"{x.dtype} activations": kind is not None,
                    "this memory layout": len(strides) == 2 and strides[1] == 1,
                },
            )
            return super().clamped_swiglu(x, gate)
        rows, width = x.shape[0], x.shape[1] // 2
        out = self._empty((rows, width), x.dtype)
        pointers = (x.data_ptr(), out.data_ptr())
        self._kernels.clamped_swiglu(kind, *pointers, rows, width, strides[0], gate.alpha, gate.limit)
        return out

    def route(self, logits: Tensor, top: int, routing: Routing) -> tuple[Tensor, Tensor]:
        kind, strides = TYPES.get(logits.dtype), logits.stride()
        rows, experts = logits.shape
        if kind is None or strides[1] != 1 or not 0 < top <= experts:
            self._fall_back(
                "route",
                {
                    f"{logits.dtype} logits": kind is not None,
                    "strided rows": strides[1] == 1,
                    f"{top} of {experts} experts": 0 < top <= experts,
                },
            )
            return super().route(logits, top, routing)
        shares, chosen = self._empty((rows, top), torch.float32), self._empty((rows, top), torch.int64)
        pointers = (logits.data_ptr(), shares.data_ptr(), chosen.data_ptr())
        self._kernels.route(kind, _ROUTINGS[routing], *pointers, rows, experts, top, strides[0])
        return shares, chosen

    def rope_rows(self, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self.take_rows(cos, positions), self.take_rows(sin, positions)

    def put_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        x_strides, strides = x.stride(), values.stride()
        rows_fit = rows.dtype == torch.int64 and rows.is_contiguous()
        fits = (
            rows_fit and len(x_strides) == 2 and x_strides[1] == strides[1] == 1 and x.dtype == values.dtype
        )
        if not fits:
            self._fall_back("put_rows", {"this memory layout or mixed types": False})
            return super().put_rows(x, rows, values)
        (count, width), size = x.shape, x.element_size()
        out = self._empty(x.shape, x.dtype)
        pointers = (x.data_ptr(), values.data_ptr(), rows.data_ptr(), out.data_ptr())
        lengths = (count, rows.shape[0], width * size, x_strides[0] * size, strides[0] * size)
        self._check(self._kernels.put_rows(*pointers, *lengths), rows, count)
        return out

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        strides = x.stride()
        if len(strides) != 2 or strides[1] != 1 or rows.dtype != torch.int64 or not rows.is_contiguous():
            self._fall_back(
                "take_rows",
                {
                    "this memory layout": len(strides) == 2 and strides[1] == 1,
                    f"{rows.dtype} or strided row numbers": rows.dtype == torch.int64
                    and rows.is_contiguous(),
                },
            )
            return super().take_rows(x, rows)
        count, (table_rows, width), size = rows.shape[0], x.shape, x.element_size()
        out = self._empty((count, width), x.dtype)
        bad = self._kernels.take_rows(
            x.data_ptr(),
            rows.data_ptr(),
            out.data_ptr(),
            count,
            table_rows,
            width * size,
            strides[0] * size,
        )
        self._check(bad, rows, table_rows)
        return out

    def sample(self, logits: Tensor, sampling: SamplingInputs, bitmask: Tensor | None = None) -> Tensor:
        kind, strides = TYPES.get(logits.dtype), logits.stride()
        masks_fit = bitmask is None or bitmask.is_contiguous()
        if kind is None or strides[1] != 1 or not masks_fit or not _fits(sampling):
            self._fall_back(
                "sample",
                {
                    f"{logits.dtype} logits": kind is not None,
                    "strided rows": strides[1] == 1,
                    "this bitmask layout": masks_fit,
                    "these parameter types": _fits(sampling),
                },
            )
            return super().sample(logits, sampling, bitmask)
        rows, vocabulary = logits.shape
        tokens = self._empty((rows,), torch.int64)
        long = rows * vocabulary > 1 << 20
        (self._kernels.long_sample if long else self._kernels.sample)(
            kind,
            logits.data_ptr(),
            strides[0],
            rows,
            vocabulary,
            sampling.temperature.data_ptr(),
            sampling.top_k.data_ptr(),
            sampling.top_p.data_ptr(),
            sampling.min_p.data_ptr(),
            sampling.uniforms.data_ptr(),
            0 if bitmask is None else bitmask.data_ptr(),
            0 if bitmask is None else bitmask.shape[1],
            tokens.data_ptr(),
        )
        return tokens

    def _check(self, bad: int, rows: Tensor, count: int) -> None:
        """Refuses the row at place ``bad``, where there is one.

        Raises:
            IndexError: it is none of ``count``.
        """
        if bad != -1:
            raise IndexError(f"row {int(rows[bad])} of a table with {count} rows")


def _elementwise_conditions(x: Tensor) -> dict[str, bool]:
    return {
        f"{x.dtype} activations": x.dtype in TYPES,
        "this memory layout": x.dim() == 2 and x.stride(1) == 1,
    }


def _scales_of(kv: LayerKV) -> int:
    """Where the scales of an int8 cache lie; 0 for another."""
    if kv.scales is None:
        assert kv.cache.dtype != torch.int8
        return 0
    assert kv.scales.dtype == torch.float32
    assert kv.scales.is_contiguous()
    return kv.scales.data_ptr()


def _fits(sampling: SamplingInputs) -> bool:
    """Whether all are contiguous and of the types that `SamplingInputs` names."""
    floats = (sampling.temperature, sampling.top_p, sampling.min_p)
    return (
        all(x.dtype == torch.float32 and x.is_contiguous() for x in floats)
        and sampling.top_k.dtype == torch.int64
        and sampling.top_k.is_contiguous()
        and sampling.uniforms.dtype == torch.float64
        and sampling.uniforms.is_contiguous()
    )
