"""Attention within the sequences of a ragged batch, without a KV cache.

A program computes ROWS rows of one query head with an online softmax over tiles of KEYS keys. GROUP query
heads share one kv head. A head has DIM dimensions. WIDTH is DIM rounded up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.cuda.programs.tiles import find_tile_group


@triton.jit
def attend_ragged(
    out,
    q,
    keys,
    values,
    row_offsets,
    bias,
    num_sequences,
    window,
    scale,
    q_row_stride,
    q_head_stride,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    out_row_stride,
    out_head_stride,
    bias_head_stride,
    bias_centre,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Compute one tile: at most ROWS rows of a sequence for one query head. Grid: tiles, query heads.

    The bias of a key depends on its distance d from the query, and is in column ``bias_centre + d`` of
    ``bias``.
    """
    sequence, first_row = find_tile_group(row_offsets, tl.program_id(0), num_sequences, ROWS)
    head = tl.program_id(1)
    start = tl.load(row_offsets + sequence)
    stop = tl.load(row_offsets + sequence + 1)
    rows = first_row + tl.arange(0, ROWS)
    is_row = (rows >= start) & (rows < stop)
    positions = rows - start
    dims = tl.arange(0, WIDTH)
    is_dim = dims < DIM
    offsets = rows.to(tl.int64)[:, None] * q_row_stride + head * q_head_stride + dims[None, :]
    queries = tl.load(q + offsets, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    first_position = first_row - start
    position_end = tl.minimum(first_row - start + ROWS, stop - start)
    key_begin = first_position * 0
    key_end = stop - start
    if HAS_WINDOW:
        key_begin = tl.maximum(first_position - window, 0) // KEYS * KEYS
        key_end = tl.minimum(key_end, position_end + window)
    if IS_CAUSAL:
        key_end = tl.minimum(key_end, position_end)
    max_score = tl.full([ROWS], float("-inf"), tl.float32)
    sum_exp = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    keys += (head // GROUP) * key_head_stride
    values += (head // GROUP) * value_head_stride
    for tile_begin in range(key_begin, key_end, KEYS):
        key_positions = tile_begin + tl.arange(0, KEYS)
        is_key = key_positions < stop - start
        key_rows = (start + key_positions).to(tl.int64)
        key_tile = tl.load(
            keys + key_rows[None, :] * key_row_stride + dims[:, None],
            mask=is_key[None, :] & is_dim[:, None],
            other=0.0,
        )
        scores = tl.dot(queries, key_tile, input_precision="ieee") * scale
        distance = key_positions[None, :] - positions[:, None]
        is_seen = is_key[None, :] & is_row[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (tl.abs(distance) <= window)
        if IS_CAUSAL:
            is_seen = is_seen & (distance <= 0)
        if HAS_BIAS:
            bias_pointers = bias + head * bias_head_stride + bias_centre + distance
            scores = scores + tl.load(bias_pointers, mask=is_seen, other=0.0).to(tl.float32)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_max = tl.maximum(max_score, tl.max(scores, 1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp(scores - base[:, None])
        factor = tl.exp(max_score - base)
        sum_exp = sum_exp * factor + tl.sum(weights, 1)
        value_tile = tl.load(
            values + key_rows[:, None] * value_row_stride + dims[None, :],
            mask=is_key[:, None] & is_dim[None, :],
            other=0.0,
        )
        product = tl.dot(weights.to(queries.dtype), value_tile, input_precision="ieee")
        sums = sums * factor[:, None] + product
        max_score = new_max
    result = sums / sum_exp[:, None]
    offsets = rows.to(tl.int64)[:, None] * out_row_stride + head * out_head_stride + dims[None, :]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :])
