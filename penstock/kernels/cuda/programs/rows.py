"""Programs on rows: norms, activations, gates, rotary embedding, writes to the KV cache."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.cuda.programs.dependent_launch import (
    launch_next,
    launch_next_and_wait,
    wait_for_previous,
)
from penstock.kernels.cuda.programs.floats8 import e4m3_codes
from penstock.kernels.cuda.programs.tiles import round_half_even, tanh


@triton.jit
def norm(
    out,
    total,
    x,
    residual,
    weight,
    bias,
    num_inner,
    outer_stride,
    inner_stride,
    residual_row_stride,
    width,
    eps,
    WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    WEIGHT_IS_WIDER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalize one row of ``x``. Grid: rows.

    Row r of ``x`` begins at ``r // num_inner * outer_stride + r % num_inner * inner_stride``. With ADDS, the
    row of ``residual`` is added to it first, and the sum is also written to ``total``. With IS_CENTRED the
    norm is a layer norm with a bias, otherwise an RMS norm. Unless WEIGHT_IS_WIDER, an RMS norm rounds to the
    type of ``x`` before it multiplies by the weight. WIDTH is a power of two, at least ``width``.
    """
    launch_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    is_column = columns < width
    factors = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    row_start = row // num_inner * outer_stride + row % num_inner * inner_stride
    values = tl.load(x + row_start + columns, mask=is_column, other=0.0)
    dtype = values.dtype
    wide_values = values.to(tl.float32)
    if ADDS:
        wide_values += tl.load(residual + row * residual_row_stride + columns, mask=is_column, other=0.0).to(
            tl.float32
        )
        rounded = wide_values.to(dtype)
        tl.store(total + row * width + columns, rounded, mask=is_column)
        wide_values = rounded.to(tl.float32)
    if IS_CENTRED:
        wide_values = tl.where(is_column, wide_values - tl.sum(wide_values, 0) / width, 0.0)
    normed = wide_values * (1 / tl.sqrt(tl.sum(wide_values * wide_values, 0) / width + eps))
    if IS_CENTRED:
        normed = normed * factors + tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    else:
        if not WEIGHT_IS_WIDER:
            normed = normed.to(dtype).to(tl.float32)
        normed = normed * factors
    tl.store(out + row * width + columns, normed.to(dtype), mask=is_column)


@triton.jit
def _activate(x, KIND: tl.constexpr):
    """Return the activation KIND of float32 numbers."""
    if KIND == "silu":
        return x / (1 + tl.exp(-x))
    elif KIND == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        positive = tl.where(x > 0, x, tl.where(x != x, x, 0.0))  # a NaN stays a NaN
        return positive * positive if KIND == "relu2" else positive


@triton.jit
def activate(out, x, width, row_stride, cap, WIDTH: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr):
    """Apply KIND, an activation or "soft_cap", to each element. Grid: rows, tiles of WIDTH columns.

    ``cap`` is used only by "soft_cap".
    """
    launch_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_column = columns < width
    values = tl.load(x + row * row_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    if KIND == "soft_cap":
        values = cap * tanh(values / cap)
    else:
        values = _activate(values, KIND)
    tl.store(out + row * width + columns, values.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def gate(out, x, width, row_stride, alpha, limit, WIDTH: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr):
    """Multiply the activation of the first half of a row by the second half.

    Grid: rows, tiles of WIDTH columns. ``alpha`` and ``limit`` are used only by the KIND "clamped_swiglu",
    which `ClampedSwiGLU` defines.
    """
    launch_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_column = columns < width
    dtype = x.dtype.element_ty
    gates = tl.load(x + row * row_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    ups = tl.load(x + row * row_stride + width + columns, mask=is_column, other=0.0).to(tl.float32)
    if KIND == "clamped_swiglu":
        gates = tl.where(gates > limit, limit, gates)
        ups = tl.where(ups > limit, limit, tl.where(ups < -limit, -limit, ups))
        values = gates / (1 + tl.exp(-alpha * gates)) * (ups + 1)
    else:
        values = _activate(gates, KIND).to(dtype).to(tl.float32) * ups
    tl.store(out + row * width + columns, values.to(dtype), mask=is_column)


@triton.jit
def rotate(
    q_out,
    k_out,
    q,
    k,
    cos,
    sin,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    num_q_heads,
    num_k_heads,
    half,
    head_dim,
    HALF: tl.constexpr,
    UNROTATED: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotate the first ``2 * half`` dimensions of one head of one row, and copy the other dimensions.

    Grid: rows, query heads + kv heads. HALF is a power of two, at least ``half``. UNROTATED is a power of
    two, at least the number of other dimensions, or 0 if there are none.
    """
    launch_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    is_query = head < num_q_heads
    tensor_head = tl.where(is_query, head, head - num_q_heads)
    pairs = tl.arange(0, HALF)
    is_pair = pairs < half
    angle_cos = tl.load(cos + row * half + pairs, mask=is_pair, other=0.0)
    angle_sin = tl.load(sin + row * half + pairs, mask=is_pair, other=0.0)
    wait_for_previous(PDL)
    if is_query:
        source = q + row * q_row_stride + tensor_head * q_head_stride
        target = q_out + (row * num_q_heads + tensor_head) * head_dim
    else:
        source = k + row * k_row_stride + tensor_head * k_head_stride
        target = k_out + (row * num_k_heads + tensor_head) * head_dim
    if IS_INTERLEAVED:
        firsts = 2 * pairs
        seconds = 2 * pairs + 1
    else:
        firsts = pairs
        seconds = half + pairs
    first = tl.load(source + firsts, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(source + seconds, mask=is_pair, other=0.0).to(tl.float32)
    dtype = q_out.dtype.element_ty
    tl.store(target + firsts, (first * angle_cos - second * angle_sin).to(dtype), mask=is_pair)
    tl.store(target + seconds, (second * angle_cos + first * angle_sin).to(dtype), mask=is_pair)
    if UNROTATED > 0:
        dims = 2 * half + tl.arange(0, UNROTATED)
        is_dim = dims < head_dim
        tl.store(target + dims, tl.load(source + dims, mask=is_dim, other=0.0), mask=is_dim)


@triton.jit
def store_keys_values(
    cache,
    scales,
    k,
    v,
    slots,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    values_stride,
    block_stride,
    head_stride,
    slot_stride,
    scale_values_stride,
    scale_block_stride,
    scale_head_stride,
    scale_slot_stride,
    head_dim,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    HAS_FIXED_SCALES: tl.constexpr,
    IS_E4M3: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the key or the value of one head of one row into the KV cache. Grid: rows, kv heads, 2.

    A block of the cache has BLOCK slots. In the cache and in ``scales``, the values begin ``values_stride``
    and ``scale_values_stride`` after the keys.

    LARGEST is the largest number that a quantized cache can store, or 0.0 for a cache without scales. With
    HAS_FIXED_SCALES, the scale is read from ``scales``. Otherwise the scale is computed from the written
    numbers, and stored in ``scales``. With IS_E4M3 the cache stores 8-bit floats as uint8.
    """
    launch_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    wait_for_previous(PDL)
    head = tl.program_id(1)
    is_value = tl.program_id(2)
    dims = tl.arange(0, WIDTH)
    is_dim = dims < head_dim
    if is_value == 0:
        source = k + row * k_row_stride + head * k_head_stride
    else:
        source = v + row * v_row_stride + head * v_head_stride
    values = tl.load(source + dims, mask=is_dim, other=0.0).to(tl.float32)
    block = slot // BLOCK
    slot_in_block = slot % BLOCK
    target = (
        cache
        + is_value * values_stride
        + block * block_stride
        + head * head_stride
        + slot_in_block * slot_stride
    )
    if LARGEST > 0:
        scale_offset = is_value * scale_values_stride + block * scale_block_stride
        scale_offset += head * scale_head_stride + slot_in_block * scale_slot_stride
        if HAS_FIXED_SCALES:
            scale = tl.load(scales + scale_offset)
        else:
            largest = tl.max(tl.abs(values), 0)
            has_nan = tl.sum((values != values).to(tl.int32), 0) > 0
            scale = tl.div_rn(tl.maximum(largest, 1e-12), LARGEST)
            scale = tl.where(has_nan, float("nan"), scale)
            tl.store(scales + scale_offset, scale)
        values = tl.div_rn(values, scale)
    if IS_E4M3:
        tl.store(target + dims, e4m3_codes(values), mask=is_dim)
    elif LARGEST > 0:
        values = tl.where(values > LARGEST, LARGEST, tl.where(values < -LARGEST, -LARGEST, values))
        values = round_half_even(values)
        tl.store(target + dims, tl.where(values == values, values, 0.0).to(tl.int8), mask=is_dim)
    else:
        tl.store(target + dims, values.to(cache.dtype.element_ty), mask=is_dim)
