"""Splits of the keys of a sequence: the ranges of splits, and merging the partial softmax of splits."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.cuda.programs.dependent_launch import launch_next, wait_for_previous


@triton.jit
def first_key(positions, window, IS_CHUNKED: tl.constexpr):
    """Return the first key that a query at each position sees."""
    if IS_CHUNKED:
        return positions // window * window
    else:
        return tl.maximum(positions - window + 1, 0)


@triton.jit
def split_range(
    sequence,
    row_offsets,
    lengths,
    window,
    num_splits,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
):
    """Return the first key of the first split of a sequence, and the number of keys per split.

    With a SPLIT of 0, the keys that the rows of the sequence see are divided evenly, in tiles of KEYS keys.
    """
    first_split_key = sequence * 0
    keys_per_split = first_split_key + SPLIT
    if SPLIT == 0:
        length = tl.load(lengths + sequence)
        if HAS_WINDOW:
            num_rows = tl.load(row_offsets + sequence + 1) - tl.load(row_offsets + sequence)
            first_split_key = first_key(length - num_rows, window, IS_CHUNKED) // KEYS * KEYS
        num_tiles = (length - first_split_key + KEYS - 1) // KEYS
        keys_per_split = (num_tiles + num_splits - 1) // num_splits * KEYS
    return first_split_key, keys_per_split


@triton.jit
def merge_partial(max_score, sum_exp, sums, other_max, other_sum_exp, other_sums):
    """Return the merged partial softmax of two splits.

    The arguments ``other_...`` belong to the split with later keys. `fma` is called explicitly, so that all
    programs round in the same way.
    """
    new_max = tl.maximum(max_score, other_max)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    factor = tl.exp(max_score - base)
    other_factor = tl.exp(other_max - base)
    sum_exp = tl.fma(other_sum_exp, other_factor, sum_exp * factor)
    factor = tl.broadcast_to(tl.expand_dims(factor, 1), sums.shape)
    other_factor = tl.broadcast_to(tl.expand_dims(other_factor, 1), sums.shape)
    return new_max, sum_exp, tl.fma(other_sums, other_factor, sums * factor)


@triton.jit
def divide_by_sum(max_score, sum_exp, sums, sinks, heads, is_row, HAS_SINKS: tl.constexpr):
    """Return the attention: the weighted sum of values, divided by the sum of exponentials.

    With sinks, the exponential of the head's sink is part of the sum.
    """
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32)
        new_max = tl.maximum(max_score, sink)
        sum_exp = sum_exp * tl.exp(max_score - new_max) + tl.exp(sink - new_max)
        sums = sums * tl.exp(max_score - new_max)[:, None]
    return sums / sum_exp[:, None]


@triton.jit
def merge_splits(
    out,
    partial_out,
    partial_max,
    partial_sum_exp,
    row_offsets,
    lengths,
    spans,
    sinks,
    num_sequences,
    num_rows,
    num_heads,
    window,
    out_row_stride,
    out_head_stride,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the splits of one row and write the attention. Grid: rows, groups of HEADS heads.

    Splits of SPLIT keys are merged in the same order as in `attend`. With a SPLIT of 0, there are at most
    SPLITS splits, which are merged at once, and HEADS must be 1.
    """
    launch_next(PDL)
    row = tl.program_id(0)
    sequence = row * 0
    last_sequence = sequence + num_sequences - 1
    while sequence < last_sequence:
        middle = (sequence + last_sequence + 1) // 2
        is_later = tl.load(row_offsets + middle) <= row
        sequence = tl.where(is_later, middle, sequence)
        last_sequence = tl.where(is_later, last_sequence, middle - 1)
    position = tl.load(lengths + sequence) - (tl.load(row_offsets + sequence + 1) - row)
    key_end = position + 1
    if HAS_SPANS:
        key_end = tl.maximum(key_end, tl.load(spans + row * 2 + 1))
    key_begin = position * 0
    if HAS_WINDOW:
        key_begin = first_key(position, window, IS_CHUNKED)
    first_split_key, keys_per_split = split_range(
        sequence, row_offsets, lengths, window, SPLITS, KEYS, SPLIT, HAS_WINDOW, IS_CHUNKED
    )
    split_begin = (key_begin - first_split_key) // keys_per_split
    split_end = (key_end - first_split_key + keys_per_split - 1) // keys_per_split
    wait_for_previous(PDL)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = heads < num_heads
    dims = tl.arange(0, WIDTH)
    if SPLIT == 0:
        splits = tl.arange(0, SPLITS)
        is_split = (splits >= split_begin) & (splits < split_end)
        offsets = (splits.to(tl.int64) * num_rows + row) * num_heads + tl.program_id(1)
        max_scores = tl.load(partial_max + offsets, mask=is_split, other=float("-inf"))
        largest = tl.max(max_scores, 0)
        factors = tl.exp(max_scores - tl.where(largest == float("-inf"), 0.0, largest))
        sums_exp = tl.load(partial_sum_exp + offsets, mask=is_split, other=0.0)
        partials = tl.load(
            partial_out + offsets[:, None] * WIDTH + dims[None, :], mask=is_split[:, None], other=0.0
        )
        max_score = largest + tl.zeros([HEADS], tl.float32)
        sum_exp = tl.sum(sums_exp * factors, 0) + tl.zeros([HEADS], tl.float32)
        sums = tl.sum(partials * factors[:, None], 0)[None, :] + tl.zeros([HEADS, WIDTH], tl.float32)
    else:
        max_score = tl.full([HEADS], float("-inf"), tl.float32)
        sum_exp = tl.zeros([HEADS], tl.float32)
        sums = tl.zeros([HEADS, WIDTH], tl.float32)
        for split in range(split_begin, split_end):
            offsets = ((row.to(tl.int64) * 0 + split) * num_rows + row) * num_heads + heads
            other_max = tl.load(partial_max + offsets, mask=is_head, other=float("-inf"))
            other_sum_exp = tl.load(partial_sum_exp + offsets, mask=is_head, other=0.0)
            other_sums = tl.load(
                partial_out + offsets[:, None] * WIDTH + dims[None, :], mask=is_head[:, None], other=0.0
            )
            max_score, sum_exp, sums = merge_partial(
                max_score, sum_exp, sums, other_max, other_sum_exp, other_sums
            )
    result = divide_by_sum(max_score, sum_exp, sums, sinks, heads, is_head, HAS_SINKS)
    offsets = row.to(tl.int64) * out_row_stride + heads[:, None] * out_head_stride + dims[None, :]
    mask = is_head[:, None] & (dims < DIM)[None, :]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=mask)
