"""Rotary embeddings, writes to and attention over the paged KV cache, and attention of encoders."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.cpu.experts import CpuExperts
from penstock.kernels.cpu.linear import DTYPE_CODES, LONG_KERNEL_MULTIPLICATIONS
from penstock.kernels.inputs import LayerKV, SequenceBlocks
from penstock.kernels.spans import ImageSpans

_CACHE_DTYPE_CODES = {**DTYPE_CODES, torch.int8: 2}
"""Codes, in csrc, of the types of the KV cache that the kernels support."""

_ENCODER_BLOCK_SIZE = 16
"""Tokens per block of the temporary KV cache into which `encoder_attention` copies keys and values.

If no sequence of a batch is longer than a block, and each token attends to its whole sequence, keys and
values are read in place. This constant must equal ``MAX_SHORT`` in csrc/short_attention.inl.
"""
_BIAS_PADDING = 64
"""Padding elements before and after the bias of each head. The kernel reads whole tiles of the bias."""
_MAX_HEAD_DIM = 1024
"""Largest head size. Sums of more integer products could overflow 32 bits (csrc/attention_tile.inl)."""


class CpuAttention(CpuExperts):
    """Attention with C++ kernels, for float32 and bfloat16 activations.

    Inputs of other types or layouts fall back to the methods of the base class.
    """

    def rotary(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        dtype_code, q_strides, k_strides = DTYPE_CODES.get(q.dtype), q.stride(), k.stride()
        tables_fit = cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
        heads_fit = q_strides[2] == k_strides[2] == 1
        if dtype_code is None or not heads_fit or k.dtype != q.dtype or not tables_fit:
            self._report_fallback(
                "rotary",
                {
                    f"{q.dtype} activations": dtype_code is not None,
                    "strided heads": heads_fit,
                    f"{k.dtype} keys": k.dtype == q.dtype,
                    "tables that are not contiguous float32": tables_fit,
                },
            )
            return super().rotary(q, k, cos, sin, is_interleaved=is_interleaved)
        q_out, k_out = self._empty(q.shape, q.dtype), self._empty(k.shape, k.dtype)
        rows, heads, dim = q.shape
        self._kernels.rotary(
            dtype_code,
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
            int(is_interleaved),
        )
        return q_out, k_out

    def store_kv(self, k: Tensor, v: Tensor, kv: LayerKV) -> None:
        dtype_code, k_strides, v_strides = DTYPE_CODES.get(k.dtype), k.stride(), v.stride()
        cache, slots = kv.cache, kv.slots
        cache_dtype_code = _CACHE_DTYPE_CODES.get(cache.dtype)
        rows_fit = k_strides[2] == v_strides[2] == 1 and k.dtype == v.dtype
        if dtype_code is None or cache_dtype_code is None or not rows_fit or not cache.is_contiguous():
            self._report_fallback(
                "store_kv",
                {
                    f"{k.dtype} keys": dtype_code is not None,
                    f"a {cache.dtype} cache": cache_dtype_code is not None,
                    "this memory layout": rows_fit and cache.is_contiguous(),
                },
            )
            super().store_kv(k, v, kv)
            return
        assert slots.dtype == torch.int64
        assert slots.is_contiguous()
        self._kernels.store_kv(
            dtype_code,
            cache_dtype_code,
            k.data_ptr(),
            v.data_ptr(),
            cache.data_ptr(),
            _scales_address(kv),
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
        spans: ImageSpans | None = None,
    ) -> Tensor:
        cache, block_tables, q_strides = kv.cache, kv.block_tables, q.stride()
        dtype_code, cache_dtype_code = DTYPE_CODES.get(q.dtype), _CACHE_DTYPE_CODES.get(cache.dtype)
        block_size, dim = cache.shape[3:]
        blocks_fit = block_size >= 16 and block_size & (block_size - 1) == 0 and cache.is_contiguous()
        rows_fit = dim % 8 == 0 and dim <= _MAX_HEAD_DIM and q_strides[2] == 1 and block_tables.stride(1) == 1
        if dtype_code is None or cache_dtype_code is None or not (blocks_fit and rows_fit):
            self._report_fallback(
                "attention",
                {
                    f"{q.dtype} queries": dtype_code is not None,
                    f"a {cache.dtype} cache": cache_dtype_code is not None,
                    f"cache blocks of {block_size} tokens (a power of two, at least 16)": blocks_fit,
                    f"a head size of {dim} (a multiple of 8, at most {_MAX_HEAD_DIM})": dim % 8 == 0
                    and dim <= _MAX_HEAD_DIM,
                    "strided queries or block tables": q_strides[2] == block_tables.stride(1) == 1,
                },
            )
            return super().attention(
                q, kv, row_offsets, lengths, scale=scale, soft_cap=soft_cap, sinks=sinks, spans=spans
            )
        assert block_tables.dtype == row_offsets.dtype == lengths.dtype == torch.int32
        if sinks is not None:
            sinks = self._keep_alive(sinks.float().contiguous())
        if spans is None:
            return self._attend(
                q,
                kv,
                row_offsets,
                lengths,
                scale=scale,
                soft_cap=soft_cap,
                sinks=sinks,
                keys_ahead=0,
                bias=None,
            )
        out = self._empty(q.shape, q.dtype)
        for part in spans.parts:
            out[part.rows] = self._attend(
                q[part.rows],
                replace(kv, block_tables=block_tables[part.sequences]),
                part.row_offsets,
                part.lengths,
                scale=scale,
                soft_cap=soft_cap,
                sinks=sinks,
                keys_ahead=part.keys_ahead,
                bias=None,
            )
        return out

    def encoder_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        row_offsets: Tensor,
        *,
        scale: float,
        window: int | None = None,
        is_causal: bool = False,
        bias: Tensor | None = None,
        blocks: SequenceBlocks | None = None,
    ) -> Tensor:
        dtype_code, dim = DTYPE_CODES.get(q.dtype), q.shape[2]
        dim_fits = dim % 8 == 0 and dim <= _MAX_HEAD_DIM
        rows_fit = q.stride(2) == k.stride(2) == v.stride(2) == 1 and k.dtype == v.dtype == q.dtype
        if dtype_code is None or not dim_fits or not rows_fit:
            self._report_fallback(
                "encoder_attention",
                {
                    f"{q.dtype} queries": dtype_code is not None,
                    f"a head size of {dim} (a multiple of 8, at most {_MAX_HEAD_DIM})": dim_fits,
                    "strided heads or mixed types": rows_fit,
                },
            )
            return super().encoder_attention(
                q, k, v, row_offsets, scale=scale, window=window, is_causal=is_causal, bias=bias
            )
        if blocks is None:
            blocks = self.sequence_blocks(row_offsets)
        if bias is not None:
            bias = F.pad(bias.float(), (_BIAS_PADDING, _BIAS_PADDING)).contiguous()
        block_tables, num_blocks = blocks.block_tables, blocks.num_blocks
        is_short = block_tables.shape[1] == 1 and not is_causal
        if is_short and (window is None or window >= _ENCODER_BLOCK_SIZE - 1):
            return self._attend_short(q, k, v, row_offsets, scale=scale, bias=bias)
        cache = self._scratch((2, num_blocks, k.shape[1], _ENCODER_BLOCK_SIZE, dim), k.dtype)
        kv = LayerKV(cache, block_tables, blocks.slots, None if window is None else window + 1)
        self.store_kv(k, v, kv)
        max_len = block_tables.shape[1] * _ENCODER_BLOCK_SIZE
        return self._attend(
            q,
            kv,
            row_offsets,
            blocks.lengths,
            scale=scale,
            soft_cap=None,
            sinks=None,
            keys_ahead=0 if is_causal else max_len if window is None else window,
            bias=bias,
        )

    def _attend_short(
        self,
        q: Tensor,  # [T, H, D]
        k: Tensor,  # [T, K, D]
        v: Tensor,  # [T, K, D]
        row_offsets: Tensor,  # [B + 1]
        *,
        scale: float,
        bias: Tensor | None,  # [H, 2P - 1 + 2 * _BIAS_PADDING]
    ) -> Tensor:  # [T, H, D]
        """Call the kernel for sequences of up to `_ENCODER_BLOCK_SIZE` tokens.

        P is at least the length of the longest sequence.
        """
        out = self._empty(q.shape, q.dtype)
        rows, heads, dim = q.shape
        is_long = rows * _ENCODER_BLOCK_SIZE * heads * dim > LONG_KERNEL_MULTIPLICATIONS
        (self._kernels.long_short_attention if is_long else self._kernels.short_attention)(
            DTYPE_CODES[q.dtype],
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            row_offsets.data_ptr(),
            0 if bias is None else bias.data_ptr() + bias.shape[1] // 2 * 4,
            len(row_offsets) - 1,
            heads,
            k.shape[1],
            dim,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            0 if bias is None else bias.shape[1],
            scale,
        )
        return out

    def _attend(
        self,
        q: Tensor,  # [T, H, D]
        kv: LayerKV,
        row_offsets: Tensor,  # [B + 1]
        lengths: Tensor,  # [B]
        *,
        scale: float,
        soft_cap: float | None,
        sinks: Tensor | None,  # [H]
        keys_ahead: int,
        bias: Tensor | None,  # [H, 2P - 1 + 2 * _BIAS_PADDING]
    ) -> Tensor:  # [T, H, D]
        """Call the kernel for attention over the paged KV cache.

        A query attends to up to ``keys_ahead`` keys after its position. If ``keys_ahead`` is 0, attention is
        causal. P is at least the length of the longest sequence.
        """
        cache, block_tables = kv.cache, kv.block_tables
        _, num_blocks, kv_heads, block_size, dim = cache.shape
        rows, heads, _ = q.shape
        out = self._empty(q.shape, q.dtype)
        is_long = rows * block_tables.shape[1] * block_size * heads * dim > LONG_KERNEL_MULTIPLICATIONS
        (self._kernels.long_attention if is_long else self._kernels.attention)(
            DTYPE_CODES[q.dtype],
            _CACHE_DTYPE_CODES[cache.dtype],
            q.data_ptr(),
            cache.data_ptr(),
            _scales_address(kv),
            out.data_ptr(),
            block_tables.data_ptr(),
            row_offsets.data_ptr(),
            lengths.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            0 if bias is None else bias.data_ptr() + bias.shape[1] // 2 * 4,
            lengths.shape[0],
            heads,
            num_blocks,
            kv_heads,
            block_size,
            dim,
            q.stride(0),
            q.stride(1),
            block_tables.stride(0),
            kv.window or 0,
            int(kv.is_chunked),
            keys_ahead,
            0 if bias is None else bias.shape[1],
            scale,
            soft_cap or 0.0,
        )
        return out

    def sequence_blocks(self, row_offsets: Tensor) -> SequenceBlocks:
        if len(row_offsets) == 2:
            return _make_single_sequence_blocks(int(row_offsets[1]) - int(row_offsets[0]))
        return _make_sequence_blocks(row_offsets.numpy().astype(np.int64))


def _make_sequence_blocks(row_offsets: npt.NDArray[np.int64]) -> SequenceBlocks:
    """Return the blocks of sequences whose row offsets are ``row_offsets [B + 1]``."""
    lengths = np.diff(row_offsets)
    block_counts = -(-lengths // _ENCODER_BLOCK_SIZE)  # [B]
    first_blocks = block_counts.cumsum() - block_counts  # [B]
    num_blocks, table_width = int(block_counts.sum()), int(block_counts.max(initial=0))
    block_tables = np.minimum(first_blocks[:, None] + np.arange(table_width), num_blocks - 1).astype(np.int32)
    slot_shifts = first_blocks * _ENCODER_BLOCK_SIZE - row_offsets[:-1]  # [B]: slot minus row
    slots = np.arange(row_offsets[-1]) + slot_shifts.repeat(lengths)
    return SequenceBlocks(
        torch.from_numpy(block_tables),
        torch.from_numpy(slots),
        torch.from_numpy(lengths.astype(np.int32)),
        num_blocks,
    )


@lru_cache(maxsize=128)
def _make_single_sequence_blocks(length: int) -> SequenceBlocks:
    """Return the blocks of one sequence. They are cached, so callers must not modify the tensors."""
    return _make_sequence_blocks(np.array([0, length]))


def _scales_address(kv: LayerKV) -> int:
    """Return the address of the scales of an int8 cache; 0 for other caches."""
    if kv.scales is None:
        assert kv.cache.dtype != torch.int8
        return 0
    assert kv.scales.dtype == torch.float32
    assert kv.scales.is_contiguous()
    return kv.scales.data_ptr()
