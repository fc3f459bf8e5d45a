"""The operations that have C++ kernels; for types and layouts that these do not take, the reference's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.kernels.cpu.library import Kernels
from penstock.kernels.inputs import LayerKV, LoRAInputs, SamplingInputs
from penstock.kernels.linear import PackedLinear
from penstock.kernels.ops import Activation
from penstock.kernels.reference import ReferenceOps

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_FLOAT_ENCODINGS = ("float32", "bfloat16")
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}

_SMALL_ROWS = {torch.float32: 64, torch.bfloat16: 32}
"""Rows up to which our `linear` is faster than torch's (`benchmarks/cpu_kernels.py linear`)."""

_LONG = 1 << 27
"""Multiplications from which a kernel takes long enough to release the GIL: some milliseconds."""


_WIDEST_HEAD = 1024
"""Sums of more products of integers could leave 32 bits (csrc/attention_tile.inl)."""


class CpuOps(ReferenceOps):
    """C++ kernels for float32 and bfloat16 activations.

    A row's bits depend on nothing but the row: not on its batch, its place there, or the threads. Only
    products of more rows than ours are fastest for are left to torch, whose sums hang on their number.

    Args:
        kernels: those of one instruction set.
        deterministic: leave no product to torch.
    """

    name = "cpu"

    def __init__(self, kernels: Kernels, *, deterministic: bool = False) -> None:
        self._kernels = kernels
        self.deterministic = deterministic

    @property
    def isa(self) -> str:
        """The instruction set of the kernels."""
        return self._kernels.isa

    def embedding(self, tokens: Tensor, table: Tensor) -> Tensor:
        return self.take_rows(table, tokens)

    def linear(self, x: Tensor, packed: PackedLinear, *, lora: LoRAInputs | None = None) -> Tensor:
        if packed.encoding not in _FLOAT_ENCODINGS or packed.tensors["weight"].dtype != x.dtype:
            return super().linear(x, packed, lora=lora)
        y = self._multiply(x, packed.tensors["weight"], packed.bias)
        return y if lora is None else self._add_lora(y, x, packed, lora)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype, (rows, inputs), outputs = x.dtype, x.shape, weight.shape[0]
        kind, row_stride, stride = _TYPES.get(dtype), *x.stride()
        fits = stride == 1 and weight.is_contiguous() and (bias is None or bias.dtype == dtype)
        if kind is None or not fits:
            return super()._multiply(x, weight, bias)
        if rows > _SMALL_ROWS[dtype] and not self.deterministic:
            return F.linear(x, weight, bias)
        y = x.new_empty(rows, outputs)
        long = rows * inputs * outputs > _LONG
        (self._kernels.long_linear if long else self._kernels.linear)(
            kind,
            kind,
            x.data_ptr(),
            row_stride,
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            rows,
            outputs,
            inputs,
        )
        return y

    def _add_lora(self, y: Tensor, x: Tensor, packed: PackedLinear, lora: LoRAInputs) -> Tensor:
        kind = _TYPES.get(x.dtype)
        parts = [part for part in packed.slices if part.name in lora.matrices]
        fits = kind is not None and x.stride(1) == y.stride(1) == 1 and y.dtype == x.dtype
        if not fits or not all(_are_stacked(*lora.matrices[part.name], x.dtype) for part in parts):
            return super()._add_lora(y, x, packed, lora)
        order, segments = lora.order, lora.segments
        for part in parts:
            down, up = lora.matrices[part.name]
            ranks = lora.ranks.get(part.name)
            _, rank, in_features = down.shape
            width = part.stop - part.start
            long = len(order) * rank * (in_features + width) > _LONG
            (self._kernels.long_lora if long else self._kernels.lora)(
                kind,
                x.data_ptr(),
                x.stride(0),
                down.data_ptr(),
                up.data_ptr(),
                y.data_ptr() + part.start * y.element_size(),
                y.stride(0),
                order.data_ptr(),
                segments.data_ptr(),
                0 if ranks is None else ranks.data_ptr(),
                len(segments),
                rank,
                width,
                in_features,
            )
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        kind, weight_kind, strides = _TYPES.get(x.dtype), _TYPES.get(weight.dtype), x.stride()
        if kind is None or weight_kind is None or len(strides) not in (2, 3) or strides[-1] != 1:
            return super().rms_norm(x, weight, eps)
        out = _new_like(x)
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
        kind, weight_kind = _TYPES.get(x.dtype), _TYPES.get(weight.dtype)
        strides, residual_strides = x.stride(), residual.stride()
        fits = len(strides) == 2 and strides[1] == residual_strides[1] == 1 and x.dtype == residual.dtype
        if kind is None or weight_kind is None or not fits:
            return super().add_rms_norm(x, residual, weight, eps)
        normed, total = _new_like(x), _new_like(x)
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
        kind, q_strides, k_strides = _TYPES.get(q.dtype), q.stride(), k.stride()
        tables = cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
        if kind is None or q_strides[2] != 1 or k_strides[2] != 1 or k.dtype != q.dtype or not tables:
            return super().rotary(q, k, cos, sin)
        q_out, k_out = _new_like(q), _new_like(k)
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
        kind, k_strides, v_strides = _TYPES.get(k.dtype), k.stride(), v.stride()
        cache, slots = kv.cache, kv.slots
        cache_kind = _CACHE_TYPES.get(cache.dtype)
        rows_fit = k_strides[2] == v_strides[2] == 1 and k.dtype == v.dtype
        if kind is None or cache_kind is None or not rows_fit or not cache.is_contiguous():
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
        kind, cache_kind = _TYPES.get(q.dtype), _CACHE_TYPES.get(cache.dtype)
        _, num_blocks, kv_heads, block_size, dim = cache.shape
        blocks_fit = block_size >= 16 and block_size & (block_size - 1) == 0 and cache.is_contiguous()
        rows_fit = dim % 8 == 0 and dim <= _WIDEST_HEAD and strides[2] == 1 and tables.stride(1) == 1
        if kind is None or cache_kind is None or not (blocks_fit and rows_fit):
            return super().attention(q, kv, row_offsets, lengths, scale=scale, soft_cap=soft_cap, sinks=sinks)
        assert tables.dtype == row_offsets.dtype == lengths.dtype == torch.int32
        if sinks is not None:
            sinks = sinks.float().contiguous()
        out = _new_like(q)
        rows, heads, _ = q.shape
        long = rows * tables.shape[1] * block_size * heads * dim > _LONG
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
        kind, strides = _TYPES.get(x.dtype), x.stride()
        if kind is None or len(strides) != 2 or strides[1] != 1:
            return super().gated_activation(x, activation)
        rows, width = x.shape
        out = x.new_empty(rows, width // 2)
        self._kernels.gated_activation(
            kind,
            _ACTIVATIONS[activation],
            x.data_ptr(),
            out.data_ptr(),
            rows,
            width // 2,
            strides[0],
        )
        return out

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        return self.gated_activation(torch.cat([x, torch.ones_like(x)], dim=1), activation)  # exact: times 1

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        strides = x.stride()
        if len(strides) != 2 or strides[1] != 1 or rows.dtype != torch.int64 or not rows.is_contiguous():
            return super().take_rows(x, rows)
        count, (table_rows, width), size = rows.shape[0], x.shape, x.element_size()
        out = x.new_empty(count, width)
        bad = self._kernels.take_rows(
            x.data_ptr(),
            rows.data_ptr(),
            out.data_ptr(),
            count,
            table_rows,
            width * size,
            strides[0] * size,
        )
        if bad != -1:
            raise IndexError(f"row {int(rows[bad])} of a table with {table_rows} rows")
        return out

    def sample(self, logits: Tensor, sampling: SamplingInputs, bitmask: Tensor | None = None) -> Tensor:
        kind, strides = _TYPES.get(logits.dtype), logits.stride()
        masks_fit = bitmask is None or bitmask.is_contiguous()
        if kind is None or strides[1] != 1 or not masks_fit or not _fits(sampling):
            return super().sample(logits, sampling, bitmask)
        rows, vocabulary = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
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


def _new_like(x: Tensor) -> Tensor:
    """An empty contiguous tensor of x's type and shape."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _scales_of(kv: LayerKV) -> int:
    """Where the scales of an int8 cache lie; 0 for another."""
    if kv.scales is None:
        assert kv.cache.dtype != torch.int8
        return 0
    assert kv.scales.dtype == torch.float32
    assert kv.scales.is_contiguous()
    return kv.scales.data_ptr()


def _are_stacked(down: Tensor, up: Tensor, dtype: torch.dtype) -> bool:
    """Whether A ``[n, R, in]`` and B, a view of ``[n, R, out]``, lie in memory as the kernel reads them."""
    return down.dtype == up.dtype == dtype and down.is_contiguous() and up.transpose(1, 2).is_contiguous()


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
