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
_COLUMNS = 1024
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
        half, dim = cos.shape[1], q.shape[2]
        tables_fit = cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
        if q.dtype not in FLOATS or q.dtype != k.dtype or not has_contiguous_rows(q, k) or not tables_fit:
            return super().rotary(q, k, cos, sin, is_interleaved=is_interleaved)
        outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
        unrotated_dims = dim - 2 * half
        launch(
            programs.rotate, (len(q), q.shape[1] + k.shape[1]), *outs, q, k, cos, sin, *q.stride()[:2],
            *k.stride()[:2], q.shape[1], k.shape[1], half, dim, HALF=power_of_two(half),
            UNROTATED=power_of_two(unrotated_dims) if unrotated_dims else 0, IS_INTERLEAVED=is_interleaved,
            is_dependent=True, num_warps=1,
        )  # fmt: skip
        return outs[0], outs[1]

    def store_kv(self, k: Tensor, v: Tensor, kv: LayerKV) -> None:
        cache, scales = kv.cache, kv.scales
        fits = (
            k.dtype in FLOATS
            and v.dtype in FLOATS
            and has_contiguous_rows(k, v, cache)
            and kv.slots.is_contiguous()
        )
        if not fits or (cache.dtype not in FLOATS and scales is None):
            return super().store_kv(k, v, kv)
        cache, is_e4m3 = cache_for_programs(cache)
        largest = 0.0 if scales is None else LARGEST_FP8 if is_e4m3 else 127.0
        scale_strides = (0, 0, 0, 0) if scales is None else scales.stride()
        launch(
            programs.store_keys_values, (len(k), k.shape[1], 2), cache, cache if scales is None else scales,
            k, v, kv.slots, *k.stride()[:2], *v.stride()[:2], *cache.stride()[:4], *scale_strides, k.shape[2],
            BLOCK=cache.shape[3], WIDTH=power_of_two(k.shape[2]), LARGEST=largest,
            HAS_FIXED_SCALES=kv.has_fixed_scales, IS_E4M3=is_e4m3, is_dependent=True, num_warps=1,
        )  # fmt: skip

    def route(
        self, logits: Tensor, top_k: int, routing: Routing, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        rows, experts = logits.shape
        fits = (
            logits.dtype in FLOATS
            and has_contiguous_rows(logits)
            and isinstance(routing, str)
            and bias is None
        )
        if not fits or not 0 < top_k <= experts <= _MAX_EXPERTS:
            return super().route(logits, top_k, routing, bias)
        topk_weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
        topk_ids = torch.empty((rows, top_k), dtype=torch.int64, device=logits.device)
        launch(
            route, (rows,), topk_weights, topk_ids, logits, experts, row_stride(logits), TOP=top_k,
            WIDTH=power_of_two(experts), ROUTING=routing, num_warps=1,
        )  # fmt: skip
        return topk_weights, topk_ids

    def sample(self, logits: Tensor, sampling: SamplingInputs, bitmask: Tensor | None = None) -> Tensor:
        rows, vocabulary = logits.shape
        if logits.dtype not in FLOATS or not has_contiguous_rows(logits):
            return super().sample(logits, sampling, bitmask)
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        chunk = min(
            max(_CHUNK_LOGITS, power_of_two(divide_up(vocabulary, _MAX_CHUNKS))), power_of_two(vocabulary, 16)
        )
        chunks = divide_up(vocabulary, chunk)
        fields = torch.empty((rows, NUM_FIELDS.value, chunks), dtype=torch.float32, device=logits.device)
        masses = torch.empty((rows, chunks), dtype=torch.float64, device=logits.device)
        # Tokens are listed only for rows with a top_k or a top_p.
        offsets_shape = (rows, chunks, chunk) if sampling.is_limited else (1,)
        offsets = torch.empty(offsets_shape, dtype=torch.int16, device=logits.device)
        mask = tokens if bitmask is None else bitmask.contiguous()
        temperature, top_k, top_p = (
            rule.contiguous() for rule in (sampling.temperature, sampling.top_k, sampling.top_p)
        )
        min_p, uniforms = sampling.min_p.contiguous(), sampling.uniforms.contiguous()
        sizes = vocabulary, chunks, row_stride(logits), 0 if bitmask is None else mask.stride(0)
        inputs = logits, mask, temperature, top_k, top_p
        chunk_constants: dict[str, Any] = {"CHUNK": chunk, "HAS_MASK": bitmask is not None}
        row_constants = chunk_constants | {"CHUNKS": power_of_two(chunks, 16)}
        launch(
            sampling_programs.summarize, (rows, chunks), fields, *inputs, *sizes, **chunk_constants,
            num_warps=4,
        )  # fmt: skip
        programs_per_row = min(chunks, divide_up(_MIN_SELECT_PROGRAMS, max(rows, 1)))
        launch(
            sampling_programs.select, (rows, programs_per_row), fields, masses, offsets, *inputs, min_p,
            *sizes, **row_constants, num_warps=4,
        )  # fmt: skip
        launch(
            sampling_programs.draw, (rows,), tokens, fields, masses, offsets, *inputs, min_p, uniforms,
            *sizes, **row_constants, SMALL_LIST=_SMALL_LIST, LARGE_LIST=_LARGE_LIST,
            SHIFT=_ZERO_BITS[logits.dtype], num_warps=16,
        )  # fmt: skip
        return tokens


def _can_norm(x: Tensor, *weights: Tensor) -> bool:
    """Return whether the norm program supports the type, width and layout of ``x`` and of the weights."""
    fits = (
        x.dtype in FLOATS and x.shape[-1] <= _MAX_NORM_WIDTH and has_contiguous_rows(x) and x.dim() in (2, 3)
    )
    return fits and all(
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
    inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    size = power_of_two(width)
    launch(
        programs.norm, (out.numel() // width,), out, total, x, x if residual is None else residual, weight,
        weight if bias is None else bias, inner, x.stride(0), inner_stride,
        0 if residual is None else residual.stride(0), width, eps, WIDTH=size, ADDS=residual is not None,
        IS_CENTRED=bias is not None,
        WEIGHT_IS_WIDER=torch.promote_types(x.dtype, weight.dtype) != x.dtype, is_dependent=True,
        num_warps=max(1, min(size // 512, 16)),
    )  # fmt: skip
    return out, total


def _apply(program: Program, x: Tensor, width: int, *scalars: float, KIND: str) -> Tensor:
    """Return the result ``[T, width]`` of an elementwise program; ``scalars`` are its further arguments."""
    out = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
    columns = min(_COLUMNS, power_of_two(width))
    grid = (len(x), divide_up(width, columns))
    launch(program, grid, out, x, width, row_stride(x), *scalars, is_dependent=True, WIDTH=columns, KIND=KIND)
    return out
