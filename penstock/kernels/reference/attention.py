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
            position = length - (stop - row)
            tile_spans = None if spans is None else spans[tile]
            out[tile] = _attend(q[tile], keys, values, position, kv, scale, soft_cap, sinks, tile_spans)
    return out


def _attend(
    q: Tensor,  # [R, H, D]; the first row is at position `position`
    keys: Tensor,  # [K, M, S, D]
    values: Tensor,  # [K, M, S, D]
    position: int,
    kv: LayerKV,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
    spans: Tensor | None,  # [R, 2]
) -> Tensor:  # [R, H, D]
    """Return the attention of a tile of rows of one sequence."""
    rows, heads, dim = q.shape
    kv_heads, blocks, block_size, _ = keys.shape
    group = heads // kv_heads  # query heads per kv head
    queries = q.float().view(rows, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
    padding = -queries.shape[1] % 8  # number of rows by which the matrix products are padded
    queries = F.pad(queries, (0, 0, 0, padding))  # [K, R', D], R' = rows x group, padded
    scores = torch.matmul(queries[:, None], keys.transpose(2, 3)) * scale  # [K, M, R', S]
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(
        ~_make_visibility_mask(position, rows, group, padding, blocks, block_size, kv, spans, q.device),
        -torch.inf,
    )
    top = scores.amax(dim=(1, 3))  # [K, R']
    sink = _sink_rows(sinks, rows, kv_heads, padding)  # [K, R']
    if sink is not None:
        top = torch.maximum(top, sink)
    weights = torch.exp(scores - top[:, None, :, None])
    total = weights.sum(-1).cumsum(1)[:, -1]  # [K, R']
    if sink is not None:
        total = total + torch.exp(sink - top)
    out = torch.matmul(weights, values).cumsum(1)[:, -1] / total[..., None]  # [K, R', D]
    out = out[:, : rows * group].view(kv_heads, rows, group, dim).transpose(0, 1)
    return out.reshape(rows, heads, dim).to(q.dtype)


def _make_visibility_mask(
    position: int,
    rows: int,
    group: int,
    padding: int,
    blocks: int,
    block_size: int,
    kv: LayerKV,
    spans: Tensor | None,  # [R, 2]
    device: torch.device,
) -> Tensor:  # [M, R', S] bool
    """Return which keys each query sees. ``group`` is the number of query heads per kv head."""
    queries = torch.arange(position, position + rows, device=device).repeat_interleave(group)
    queries = F.pad(queries, (0, padding), value=position)[None, :, None]  # padding sees the keys of row 0
    keys = torch.arange(blocks * block_size, device=device).view(blocks, 1, block_size)
    visible = keys <= queries
    if spans is not None:
        ends = F.pad(spans[:, 1].long().repeat_interleave(group), (0, padding))  # [R']
        visible = visible | (keys < ends[:, None])
    if kv.window is None:
        return visible
    if kv.is_chunked:
        return visible & (keys >= queries // kv.window * kv.window)
    return visible & (keys > queries - kv.window)


def _sink_rows(sinks: Tensor | None, rows: int, kv_heads: int, padding: int) -> Tensor | None:  # [K, R']
    """Return the sink of each query, padded; None without sinks."""
    if sinks is None:
        return None
    per_row = sinks.float().view(kv_heads, 1, -1).expand(-1, rows, -1).reshape(kv_heads, -1)
    return F.pad(per_row, (0, padding))


def _gather_keys_values(kv: LayerKV, sequence: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of one sequence in float32, ``[K, M, S, D]`` each."""
    block_size = kv.cache.shape[3]
    table = kv.block_tables[sequence, : -(-length // block_size)].long()
    pair = kv.cache[:, table].float()  # [2, M, K, S, D]
    if kv.scales is not None:
        pair = pair * kv.scales[:, table][..., None]
    # The weights of values after `length` are 0, but 0 times a stale NaN would be NaN.
    pair[:, -1, :, length - (len(table) - 1) * block_size :] = 0
    keys, values = pair.transpose(1, 2)
    return keys, values
