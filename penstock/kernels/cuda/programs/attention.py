"""Attention over the paged KV cache with an online softmax. A program computes a tile of queries.

A tile has ROWS rows of a sequence, and for each row the GROUP query heads that share one kv head. These are
at most M queries. A head has DIM dimensions. WIDTH is DIM rounded up to a power of two, as Triton's blocks
require. A block of the cache has BLOCK slots. Tiles of keys begin at multiples of KEYS from the start of the
sequence, and are processed in order. A key that a row does not see changes neither the row's maximum nor its
sums. With the same splits, the bits of a row therefore depend neither on the other rows of its tile nor on
the chunks of a prefill.

The keys may be divided into splits. `attend` computes the splits of a tile one after the other.
`attend_split` computes each split in a separate program, and `splits.merge_splits` merges them. If splits
have SPLIT keys and begin at multiples of SPLIT, both ways give the same bits. With a SPLIT of 0, `attend` has
one split, and `attend_split` divides the keys of a sequence evenly among its programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.cuda.programs.dependent_launch import launch_next, wait_for_previous
from penstock.kernels.cuda.programs.floats8 import e4m3_values
from penstock.kernels.cuda.programs.splits import divide_by_sum, first_key, merge_partial, split_range
from penstock.kernels.cuda.programs.tiles import find_tile_group, tanh


@triton.jit
def _load_tile(
    q,
    row_offsets,
    lengths,
    spans,
    num_sequences,
    window,
    q_row_stride,
    q_head_stride,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    TO_FLOAT32: tl.constexpr,
    PDL: tl.constexpr,
):
    """Return this program's tile, and the keys that its queries see.

    Returns the sequence of the tile, then for each query the row, the head, whether the query exists, the
    vector, and the begin and the end of the keys that it sees. The last two results are the begin and the end
    of the smallest range that contains the keys of all queries. Row offsets, lengths and spans are inputs of
    the step, so they are read before the previous kernel has ended.
    """
    sequence, first_row = find_tile_group(row_offsets, tl.program_id(0), num_sequences, ROWS)
    start = tl.load(row_offsets + sequence)
    stop = tl.load(row_offsets + sequence + 1)
    indices = tl.arange(0, M)
    rows = first_row + indices // GROUP
    heads = tl.program_id(1) * GROUP + indices % GROUP
    is_row = (indices < ROWS * GROUP) & (rows >= start) & (rows < stop)
    positions = tl.load(lengths + sequence) - (stop - rows)
    key_end = positions + 1
    if HAS_SPANS:
        key_end = tl.maximum(key_end, tl.load(spans + rows * 2 + 1, mask=is_row, other=0))
    key_begin = positions * 0
    if HAS_WINDOW:
        key_begin = first_key(positions, window, IS_CHUNKED)
    wait_for_previous(PDL)
    dims = tl.arange(0, WIDTH)
    offsets = rows.to(tl.int64)[:, None] * q_row_stride + heads[:, None] * q_head_stride + dims[None, :]
    queries = tl.load(q + offsets, mask=is_row[:, None] & (dims < DIM)[None, :], other=0.0)
    if TO_FLOAT32:
        queries = queries.to(tl.float32)
    tile_key_begin = tl.min(tl.where(is_row, key_begin, 1 << 30), 0)
    tile_key_end = tl.max(tl.where(is_row, key_end, 0), 0)
    key_end = tl.where(is_row, key_end, 0)
    return sequence, rows, heads, is_row, queries, key_begin, key_end, tile_key_begin, tile_key_end


@triton.jit
def _attend_keys(
    queries,
    key_begin,
    key_end,
    tile_key_begin,
    tile_key_end,
    key_range_begin,
    key_range_end,
    keys,
    values,
    key_scales,
    value_scales,
    block_table,
    block_stride,
    slot_stride,
    scale_block_stride,
    scale_slot_stride,
    scale,
    soft_cap,
    M: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_E4M3: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Return the partial softmax of the queries over the keys ``key_range_begin:key_range_end``.

    The result is the largest score, the sum of exponentials, and the weighted sum of values of each query.
    """
    max_score = tl.full([M], float("-inf"), tl.float32)
    sum_exp = tl.zeros([M], tl.float32)
    out = tl.zeros([M, WIDTH], tl.float32)
    dims = tl.arange(0, WIDTH)
    is_dim = dims < DIM
    for tile_begin in range(key_range_begin, key_range_end, KEYS):
        positions = tile_begin + tl.arange(0, KEYS)
        is_in_range = (positions >= tile_key_begin) & (positions < tile_key_end)
        blocks = tl.load(block_table + positions // BLOCK, mask=is_in_range, other=0).to(tl.int64)
        slot_offsets = blocks * block_stride + (positions % BLOCK) * slot_stride
        key_tile = tl.load(
            keys + slot_offsets[None, :] + dims[:, None], mask=is_in_range[None, :] & is_dim[:, None], other=0
        )
        if IS_E4M3:
            key_tile = e4m3_values(key_tile)
        scores = tl.dot(queries, key_tile.to(queries.dtype), input_precision="ieee") * scale
        if IS_SCALED:
            scale_offsets = blocks * scale_block_stride + (positions % BLOCK) * scale_slot_stride
            scores = scores * tl.load(key_scales + scale_offsets, mask=is_in_range, other=0.0)[None, :]
        if HAS_CAP:
            scores = soft_cap * tanh(scores / soft_cap)
        is_seen = (positions[None, :] >= key_begin[:, None]) & (positions[None, :] < key_end[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        new_max = tl.maximum(max_score, tl.max(scores, 1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp(scores - base[:, None])
        factor = tl.exp(max_score - base)
        sum_exp = sum_exp * factor + tl.sum(weights, 1)
        if IS_SCALED:
            loaded_value_scales = tl.load(value_scales + scale_offsets, mask=is_in_range, other=0.0)[None, :]
            weights = tl.where(is_seen, weights * loaded_value_scales, 0.0)
        value_tile = tl.load(
            values + slot_offsets[:, None] + dims[None, :],
            mask=is_in_range[:, None] & is_dim[None, :],
            other=0,
        )
        if IS_E4M3:
            value_tile = e4m3_values(value_tile)
        product = tl.dot(weights.to(queries.dtype), value_tile.to(queries.dtype), input_precision="ieee")
        out = out * factor[:, None] + product
        max_score = new_max
    return max_score, sum_exp, out


@triton.jit
def attend(
    out,
    q,
    keys,
    values,
    key_scales,
    value_scales,
    block_tables,
    row_offsets,
    lengths,
    spans,
    sinks,
    num_sequences,
    window,
    scale,
    soft_cap,
    q_row_stride,
    q_head_stride,
    out_row_stride,
    out_head_stride,
    block_stride,
    head_stride,
    slot_stride,
    scale_block_stride,
    scale_head_stride,
    scale_slot_stride,
    block_table_stride,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_E4M3: tl.constexpr,
    TO_FLOAT32: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the attention of one tile. Grid: tiles, kv heads. With a SPLIT of 0 all keys are one split."""
    launch_next(PDL)
    sequence, rows, heads, is_row, queries, key_begin, key_end, tile_key_begin, tile_key_end = _load_tile(
        q, row_offsets, lengths, spans, num_sequences, window, q_row_stride, q_head_stride,
        ROWS, GROUP, M, DIM, WIDTH, HAS_WINDOW, IS_CHUNKED, HAS_SPANS, TO_FLOAT32, PDL,
    )  # fmt: skip
    keys += tl.program_id(1) * head_stride
    values += tl.program_id(1) * head_stride
    key_scales += tl.program_id(1) * scale_head_stride
    value_scales += tl.program_id(1) * scale_head_stride
    block_table = block_tables + sequence.to(tl.int64) * block_table_stride
    key_range_begin = tile_key_begin // KEYS * KEYS
    if SPLIT == 0:
        max_score, sum_exp, sums = _attend_keys(
            queries, key_begin, key_end, tile_key_begin, tile_key_end, key_range_begin, tile_key_end, keys,
            values, key_scales, value_scales, block_table, block_stride, slot_stride, scale_block_stride,
            scale_slot_stride, scale, soft_cap, M, KEYS, DIM, WIDTH, BLOCK, IS_SCALED, IS_E4M3, HAS_CAP,
        )  # fmt: skip
    else:
        max_score = tl.full([M], float("-inf"), tl.float32)
        sum_exp = tl.zeros([M], tl.float32)
        sums = tl.zeros([M, WIDTH], tl.float32)
        for split in range(tile_key_begin // SPLIT, (tile_key_end + SPLIT - 1) // SPLIT):
            other_max, other_sum_exp, other_sums = _attend_keys(
                queries, key_begin, key_end, tile_key_begin, tile_key_end,
                tl.maximum(split * SPLIT, key_range_begin), tl.minimum(split * SPLIT + SPLIT, tile_key_end),
                keys, values, key_scales, value_scales, block_table,
                block_stride, slot_stride, scale_block_stride, scale_slot_stride, scale, soft_cap,
                M, KEYS, DIM, WIDTH, BLOCK, IS_SCALED, IS_E4M3, HAS_CAP,
            )  # fmt: skip
            max_score, sum_exp, sums = merge_partial(
                max_score, sum_exp, sums, other_max, other_sum_exp, other_sums
            )
    result = divide_by_sum(max_score, sum_exp, sums, sinks, heads, is_row, HAS_SINKS)
    dims = tl.arange(0, WIDTH)
    offsets = rows.to(tl.int64)[:, None] * out_row_stride + heads[:, None] * out_head_stride + dims[None, :]
    mask = is_row[:, None] & (dims < DIM)[None, :]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def attend_split(
    partial_out,
    partial_max,
    partial_sum_exp,
    q,
    keys,
    values,
    key_scales,
    value_scales,
    block_tables,
    row_offsets,
    lengths,
    spans,
    num_sequences,
    num_rows,
    num_heads,
    window,
    scale,
    soft_cap,
    q_row_stride,
    q_head_stride,
    block_stride,
    head_stride,
    slot_stride,
    scale_block_stride,
    scale_head_stride,
    scale_slot_stride,
    block_table_stride,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_SCALED: tl.constexpr,
    IS_E4M3: tl.constexpr,
    TO_FLOAT32: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one split of one tile, before the division by the sum. Grid: tiles, kv heads, splits.

    ``partial_out [splits, T, H, WIDTH]``, ``partial_max`` and ``partial_sum_exp [splits, T, H]`` are float32.
    Splits whose keys no row of the tile sees are not written.
    """
    launch_next(PDL)
    sequence, rows, heads, is_row, queries, key_begin, key_end, tile_key_begin, tile_key_end = _load_tile(
        q, row_offsets, lengths, spans, num_sequences, window, q_row_stride, q_head_stride,
        ROWS, GROUP, M, DIM, WIDTH, HAS_WINDOW, IS_CHUNKED, HAS_SPANS, TO_FLOAT32, PDL,
    )  # fmt: skip
    split = tl.program_id(2)
    first_split_key, keys_per_split = split_range(
        sequence, row_offsets, lengths, window, tl.num_programs(2), KEYS, SPLIT, HAS_WINDOW, IS_CHUNKED
    )
    key_range_begin = tl.maximum(first_split_key + split * keys_per_split, tile_key_begin // KEYS * KEYS)
    key_range_end = tl.minimum(first_split_key + (split + 1) * keys_per_split, tile_key_end)
    if key_range_begin < key_range_end:
        max_score, sum_exp, sums = _attend_keys(
            queries, key_begin, key_end, tile_key_begin, tile_key_end, key_range_begin, key_range_end,
            keys + tl.program_id(1) * head_stride, values + tl.program_id(1) * head_stride,
            key_scales + tl.program_id(1) * scale_head_stride,
            value_scales + tl.program_id(1) * scale_head_stride,
            block_tables + sequence.to(tl.int64) * block_table_stride,
            block_stride, slot_stride, scale_block_stride, scale_slot_stride, scale, soft_cap,
            M, KEYS, DIM, WIDTH, BLOCK, IS_SCALED, IS_E4M3, HAS_CAP,
        )  # fmt: skip
        offsets = (split.to(tl.int64) * num_rows + rows) * num_heads + heads
        tl.store(partial_max + offsets, max_score, mask=is_row)
        tl.store(partial_sum_exp + offsets, sum_exp, mask=is_row)
        dims = tl.arange(0, WIDTH)
        tl.store(partial_out + offsets[:, None] * WIDTH + dims[None, :], sums, mask=is_row[:, None])
