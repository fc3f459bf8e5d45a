"""Operations on rows: norms, activations, rotary embedding, cache writes, routing and sampling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.kernels.activations import Activation
from penstock.kernels.codes import LARGEST_FP8
from penstock.kernels.cuda.attention import FLOATS, cache_for_programs
from penstock.kernels.cuda.launch import (
    Program,
    divide_up,
    has_contiguous_rows,
    launch,
    power_of_two,
    row_stride,
)
from penstock.kernels.cuda.lookups import CudaLookups
from penstock.kernels.cuda.programs import rows as programs
from penstock.kernels.cuda.programs import sampling as sampling_programs
from penstock.kernels.cuda.programs.logits import NUM_FIELDS
from penstock.kernels.cuda.programs.routing import route
from penstock.kernels.experts import ClampedSwiGLU
from penstock.kernels.inputs import LayerKV, SamplingInputs
from penstock.kernels.routing import Routing

_MAX_NORM_WIDTH = 1 << 15
"""Maximum width of a row in the norm program, which holds the whole row in registers."""
_MAX_EXPERTS = 1024
"""Maximum number of experts of the routing program."""
_MAX_TILE_COLUMNS = 1024
"""Maximum number of columns per tile of elementwise programs."""
_CHUNK_LOGITS = 1024
"""Number of logits per chunk of the sampler.

A chunk of a small vocabulary has fewer logits, and a chunk of a vocabulary with more than `_MAX_CHUNKS` such
chunks has more.
"""
_MAX_CHUNKS = 256
"""Maximum number of chunks of a row."""
_MIN_SELECT_PROGRAMS = 1024
"""Minimum number of programs of `sampling.select`, unless the rows have fewer chunks in total.

The number does not change the results.
"""
_SMALL_LIST, _LARGE_LIST = 1024, 4096
"""Maximum numbers of listed tokens of the two versions of `draw_from_list`, which use registers only."""
_ZERO_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""For each element type, the number of low bits that are 0 in a float32 number converted from this type."""


class CudaRows(CudaLookups):
    """Operations whose result for a row depends only on that row."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _can_norm(x, weight):
            return super().rms_norm(x, weight, eps)
        return _norm(x, None, weight, None, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if (
            x.dim() != 2
            or x.dtype != residual.dtype
            or not _can_norm(x, weight)
            or not has_contiguous_rows(residual)
        ):
            return super().add_rms_norm(x, residual, weight, eps)
        return _norm(x, residual, weight, None, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        if not _can_norm(x, weight, bias):
            return super().layer_norm(x, weight, bias, eps)
        return _norm(x, None, weight, bias, eps)[0]

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if x.dim() != 2 or x.dtype != residual.dtype or not _can_norm(x, weight, bias):
            return super().add_layer_norm(x, residual, weight, bias, eps)
        return _norm(
            x, residual if has_contiguous_rows(residual) else residual.contiguous(), weight, bias, eps
        )

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        if x.dim() != 2 or x.dtype not in FLOATS or not has_contiguous_rows(x):
            return super().soft_cap(x, cap)
        return _apply(programs.activate, x, x.shape[1], cap, KIND="soft_cap")

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        if x.dim() != 2 or x.dtype not in FLOATS or not has_contiguous_rows(x):
            return super().activation(x, activation)
        return _apply(programs.activate, x, x.shape[1], 0.0, KIND=activation)

    def gated_activation(self, x: Tensor, activation: Activation) -> Tensor:
        if x.dtype not in FLOATS or not has_contiguous_rows(x):
            return super().gated_activation(x, activation)
        return _apply(programs.gate, x, x.shape[1] // 2, 0.0, 0.0, KIND=activation)

    def clamped_swiglu(self, x: Tensor, gate: ClampedSwiGLU) -> Tensor:
        if x.dtype not in FLOATS or not has_contiguous_rows(x):
            return super().clamped_swiglu(x, gate)
        return _apply(programs.gate, x, x.shape[1] // 2, gate.alpha, gate.limit, KIND="clamped_swiglu")

    def rotary(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        half, head_dim = cos.shape[1], q.shape[2]
        tables_fit = cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
        if q.dtype not in FLOATS or q.dtype != k.dtype or not has_contiguous_rows(q, k) or not tables_fit:
            return super().rotary(q, k, cos, sin, is_interleaved=is_interleaved)
        outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
        unrotated_dims = head_dim - 2 * half
        launch(
            programs.rotate, (len(q), q.shape[1] + k.shape[1]), *outs, q, k, cos, sin, *q.stride()[:2],
            *k.stride()[:2], q.shape[1], k.shape[1], half, head_dim, HALF=power_of_two(half),
            UNROTATED=power_of_two(unrotated_dims) if unrotated_dims else 0, IS_INTERLEAVED=is_interleaved,
            is_dependent=True, num_warps=1,
        )  # fmt: skip
        return outs[0], outs[1]

    def store_kv(self, k: Tensor, v: Tensor, kv: LayerKV) -> None:
        cache, scales = kv.cache, kv.scales
        is_supported = (
            k.dtype in FLOATS
            and v.dtype in FLOATS
            and has_contiguous_rows(k, v, cache)
            and kv.slots.is_contiguous()
        )
        if not is_supported or (cache.dtype not in FLOATS and scales is None):
            return super().store_kv(k, v, kv)
        cache, is_e4m3 = cache_for_programs(cache)
        largest_number = 0.0 if scales is None else LARGEST_FP8 if is_e4m3 else 127.0
        scale_strides = (0, 0, 0, 0) if scales is None else scales.stride()
        launch(
            programs.store_keys_values, (len(k), k.shape[1], 2), cache, cache if scales is None else scales,
            k, v, kv.slots, *k.stride()[:2], *v.stride()[:2], *cache.stride()[:4], *scale_strides, k.shape[2],
            BLOCK=cache.shape[3], WIDTH=power_of_two(k.shape[2]), LARGEST=largest_number,
            HAS_FIXED_SCALES=kv.has_fixed_scales, IS_E4M3=is_e4m3, is_dependent=True, num_warps=1,
        )  # fmt: skip

    def route(
        self, logits: Tensor, top_k: int, routing: Routing, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        num_rows, num_experts = logits.shape
        is_supported = (
            logits.dtype in FLOATS
            and has_contiguous_rows(logits)
            and isinstance(routing, str)
            and bias is None
        )
        if not is_supported or not 0 < top_k <= num_experts <= _MAX_EXPERTS:
            return super().route(logits, top_k, routing, bias)
        topk_weights = torch.empty((num_rows, top_k), dtype=torch.float32, device=logits.device)
        topk_ids = torch.empty((num_rows, top_k), dtype=torch.int64, device=logits.device)
        launch(
            route, (num_rows,), topk_weights, topk_ids, logits, num_experts, row_stride(logits), TOP=top_k,
            WIDTH=power_of_two(num_experts), ROUTING=routing, num_warps=1,
        )  # fmt: skip
        return topk_weights, topk_ids

    def sample(self, logits: Tensor, sampling: SamplingInputs, bitmask: Tensor | None = None) -> Tensor:
        num_rows, vocabulary_size = logits.shape
        if logits.dtype not in FLOATS or not has_contiguous_rows(logits):
            return super().sample(logits, sampling, bitmask)
        tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        chunk_size = min(
            max(_CHUNK_LOGITS, power_of_two(divide_up(vocabulary_size, _MAX_CHUNKS))),
            power_of_two(vocabulary_size, 16),
        )
        num_chunks = divide_up(vocabulary_size, chunk_size)
        fields = torch.empty(
            (num_rows, NUM_FIELDS.value, num_chunks), dtype=torch.float32, device=logits.device
        )
        masses = torch.empty((num_rows, num_chunks), dtype=torch.float64, device=logits.device)
        # Tokens are listed only for rows with a top_k or a top_p.
        listed_offsets_shape = (num_rows, num_chunks, chunk_size) if sampling.has_top_k_or_top_p else (1,)
        listed_offsets = torch.empty(listed_offsets_shape, dtype=torch.int16, device=logits.device)
        bitmask_or_placeholder = tokens if bitmask is None else bitmask.contiguous()
        temperature, top_k, top_p = (
            rule.contiguous() for rule in (sampling.temperature, sampling.top_k, sampling.top_p)
        )
        min_p, uniforms = sampling.min_p.contiguous(), sampling.uniforms.contiguous()
        size_arguments = (
            vocabulary_size,
            num_chunks,
            row_stride(logits),
            0 if bitmask is None else bitmask_or_placeholder.stride(0),
        )
        row_arguments = logits, bitmask_or_placeholder, temperature, top_k, top_p
        chunk_constants: dict[str, Any] = {"CHUNK": chunk_size, "HAS_MASK": bitmask is not None}
        row_constants = chunk_constants | {"CHUNKS": power_of_two(num_chunks, 16)}
        launch(
            sampling_programs.summarize, (num_rows, num_chunks), fields, *row_arguments, *size_arguments,
            **chunk_constants, num_warps=4,
        )  # fmt: skip
        programs_per_row = min(num_chunks, divide_up(_MIN_SELECT_PROGRAMS, max(num_rows, 1)))
        launch(
            sampling_programs.select, (num_rows, programs_per_row), fields, masses, listed_offsets,
            *row_arguments, min_p, *size_arguments, **row_constants, num_warps=4,
        )  # fmt: skip
        launch(
            sampling_programs.draw, (num_rows,), tokens, fields, masses, listed_offsets, *row_arguments,
            min_p, uniforms, *size_arguments, **row_constants, SMALL_LIST=_SMALL_LIST, LARGE_LIST=_LARGE_LIST,
            SHIFT=_ZERO_BITS[logits.dtype], num_warps=16,
        )  # fmt: skip
        return tokens


def _can_norm(x: Tensor, *weights: Tensor) -> bool:
    """Return whether the norm program supports the type, width and layout of ``x`` and of the weights."""
    is_supported = (
        x.dtype in FLOATS and x.shape[-1] <= _MAX_NORM_WIDTH and has_contiguous_rows(x) and x.dim() in (2, 3)
    )
    return is_supported and all(
        weight.is_contiguous() and weight.dtype in FLOATS and weight.dim() == 1 for weight in weights
    )


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the norm of ``x + residual``, and the sum ``x + residual``.

    Without ``residual``, both results are the norm of ``x``. The norm is a layer norm if ``bias`` is given,
    else an RMS norm.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    width = x.shape[-1]
    num_inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    tile_columns = power_of_two(width)
    launch(
        programs.norm, (out.numel() // width,), out, total, x, x if residual is None else residual, weight,
        weight if bias is None else bias, num_inner, x.stride(0), inner_stride,
        0 if residual is None else residual.stride(0), width, eps, WIDTH=tile_columns,
        ADDS=residual is not None, IS_CENTRED=bias is not None,
        WEIGHT_IS_WIDER=torch.promote_types(x.dtype, weight.dtype) != x.dtype, is_dependent=True,
        num_warps=max(1, min(tile_columns // 512, 16)),
    )  # fmt: skip
    return out, total


def _apply(program: Program, x: Tensor, width: int, *scalars: float, KIND: str) -> Tensor:
    """Return the result ``[T, width]`` of an elementwise program; ``scalars`` are its further arguments."""
    out = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
    tile_columns = min(_MAX_TILE_COLUMNS, power_of_two(width))
    grid = (len(x), divide_up(width, tile_columns))
    launch(
        program,
        grid,
        out,
        x,
        width,
        row_stride(x),
        *scalars,
        is_dependent=True,
        WIDTH=tile_columns,
        KIND=KIND,
    )
    return out
