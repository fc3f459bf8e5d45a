"""Causal attention over the paged KV cache, for one sequence and one tile of queries at a time.

With ``spans``, a query of an image also sees the later keys of its image.

Keys are processed in whole blocks from position 0. Each block yields a sum of exponentials and a weighted sum
of values. The sums of the blocks are added from left to right by a sequential cumulative sum. A block that a
query does not see adds exact zeros. The bits of a query's result therefore depend neither on the number of
keys after it nor on the other queries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.inputs import LayerKV

QUERY_TILE = 32
"""Number of rows per tile."""


def paged_attention(
    q: Tensor,  # [T, H, D]
    kv: LayerKV,
    row_offsets: Tensor,  # [B + 1]
    lengths: Tensor,  # [B]
    *,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,  # [H]
    spans: Tensor | None = None,  # [T, 2]
) -> Tensor:  # [T, H, D]
    """See `Ops.attention`."""
    out = torch.empty_like(q)
    offsets = row_offsets.tolist()
    for sequence, length in enumerate(lengths.tolist()):
        start, stop = offsets[sequence], offsets[sequence + 1]
        keys, values = _gather_keys_values(kv, sequence, length)  # [K, M, S, D]
        for row in range(start, stop, QUERY_TILE):
            tile = slice(row, min(row + QUERY_TILE, stop))
            first_position = length - (stop - row)
            tile_spans = None if spans is None else spans[tile]
            out[tile] = _attend(q[tile], keys, values, first_position, kv, scale, soft_cap, sinks, tile_spans)
    return out


def _attend(
    q: Tensor,  # [R, H, D]; the first row is at position `first_position`
    keys: Tensor,  # [K, M, S, D]
    values: Tensor,  # [K, M, S, D]
    first_position: int,
    kv: LayerKV,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
    spans: Tensor | None,  # [R, 2]
) -> Tensor:  # [R, H, D]
    """Return the attention of a tile of rows of one sequence."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, num_blocks, block_size, _ = keys.shape
    heads_per_kv_head = num_heads // num_kv_heads
    queries = (
        q.float()
        .view(num_rows, num_kv_heads, heads_per_kv_head, head_dim)
        .transpose(0, 1)
        .reshape(num_kv_heads, -1, head_dim)
    )
    padding = -queries.shape[1] % 8  # number of rows by which the matrix products are padded
    queries = F.pad(queries, (0, 0, 0, padding))  # [K, R', D], R' = num_rows * heads_per_kv_head, padded
    scores = torch.matmul(queries[:, None], keys.transpose(2, 3)) * scale  # [K, M, R', S]
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(
        ~_make_visibility_mask(
            first_position, num_rows, heads_per_kv_head, padding, num_blocks, block_size, kv, spans, q.device
        ),
        -torch.inf,
    )
    max_scores = scores.amax(dim=(1, 3))  # [K, R']
    sink_scores = _sink_rows(sinks, num_rows, num_kv_heads, padding)  # [K, R']
    if sink_scores is not None:
        max_scores = torch.maximum(max_scores, sink_scores)
    weights = torch.exp(scores - max_scores[:, None, :, None])
    sums_exp = weights.sum(-1).cumsum(1)[:, -1]  # [K, R']
    if sink_scores is not None:
        sums_exp = sums_exp + torch.exp(sink_scores - max_scores)
    out = torch.matmul(weights, values).cumsum(1)[:, -1] / sums_exp[..., None]  # [K, R', D]
    out = (
        out[:, : num_rows * heads_per_kv_head]
        .view(num_kv_heads, num_rows, heads_per_kv_head, head_dim)
        .transpose(0, 1)
    )
    return out.reshape(num_rows, num_heads, head_dim).to(q.dtype)


def _make_visibility_mask(
    first_position: int,
    num_rows: int,
    heads_per_kv_head: int,
    padding: int,
    num_blocks: int,
    block_size: int,
    kv: LayerKV,
    spans: Tensor | None,  # [R, 2]
    device: torch.device,
) -> Tensor:  # [M, R', S] bool
    """Return which keys each query sees. The queries of a row are its ``heads_per_kv_head`` query heads."""
    query_positions = torch.arange(
        first_position, first_position + num_rows, device=device
    ).repeat_interleave(heads_per_kv_head)
    # The padding sees the keys of row 0.
    query_positions = F.pad(query_positions, (0, padding), value=first_position)[None, :, None]
    key_positions = torch.arange(num_blocks * block_size, device=device).view(num_blocks, 1, block_size)
    is_visible = key_positions <= query_positions
    if spans is not None:
        span_ends = F.pad(spans[:, 1].long().repeat_interleave(heads_per_kv_head), (0, padding))  # [R']
        is_visible = is_visible | (key_positions < span_ends[:, None])
    if kv.window is None:
        return is_visible
    if kv.is_chunked:
        return is_visible & (key_positions >= query_positions // kv.window * kv.window)
    return is_visible & (key_positions > query_positions - kv.window)


def _sink_rows(
    sinks: Tensor | None, num_rows: int, num_kv_heads: int, padding: int
) -> Tensor | None:  # [K, R']
    """Return the sink of each query, padded; None without sinks."""
    if sinks is None:
        return None
    row_sinks = sinks.float().view(num_kv_heads, 1, -1).expand(-1, num_rows, -1).reshape(num_kv_heads, -1)
    return F.pad(row_sinks, (0, padding))


def _gather_keys_values(kv: LayerKV, sequence: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of one sequence in float32, ``[K, M, S, D]`` each."""
    block_size = kv.cache.shape[3]
    blocks = kv.block_tables[sequence, : -(-length // block_size)].long()
    keys_and_values = kv.cache[:, blocks].float()  # [2, M, K, S, D]
    if kv.scales is not None:
        keys_and_values = keys_and_values * kv.scales[:, blocks][..., None]
    # The weights of values after `length` are 0, but 0 times a stale NaN would be NaN.
    keys_and_values[:, -1, :, length - (len(blocks) - 1) * block_size :] = 0
    keys, values = keys_and_values.transpose(1, 2)
    return keys, values
