"""Attention within the sequences of a ragged batch, without a KV cache.

Each sequence is computed separately, so its results do not depend on the other sequences of the batch.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

QUERY_TILE = 128
"""Maximum number of rows per tile.

The limit bounds the memory of the scores to ``H * QUERY_TILE`` floats per key.
"""


def ragged_attention(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [T, K, D]
    v: Tensor,  # [T, K, D]
    row_offsets: Tensor,  # [B + 1]
    *,
    scale: float,
    window: int | None,
    is_causal: bool,
    bias: Tensor | None,  # [H, 2P - 1]
) -> Tensor:  # [T, H, D]
    """See `Ops.encoder_attention`."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    heads_per_kv_head = q.shape[1] // k.shape[1]
    for start, stop in pairwise(row_offsets.tolist()):
        keys = k[start:stop].float().transpose(0, 1).repeat_interleave(heads_per_kv_head, 0)  # [H, n, D]
        values = v[start:stop].float().transpose(0, 1).repeat_interleave(heads_per_kv_head, 0)  # [H, n, D]
        key_positions = torch.arange(stop - start, device=q.device)
        for row in range(start, stop, QUERY_TILE):
            tile = slice(row, min(row + QUERY_TILE, stop))
            queries = q[tile].float().transpose(0, 1)  # [H, R, D]
            scores = queries @ keys.transpose(1, 2) * scale  # [H, R, n]
            positions = torch.arange(row - start, tile.stop - start, device=q.device)
            distance = key_positions - positions[:, None]  # [R, n]
            if bias is not None:
                scores = scores + bias.float()[:, distance + bias.shape[1] // 2]
            is_visible = torch.ones_like(distance, dtype=torch.bool)
            if window is not None:
                is_visible &= distance.abs() <= window
            if is_causal:
                is_visible &= distance <= 0
            weights = scores.masked_fill(~is_visible, -torch.inf).softmax(-1)
            out[tile] = (weights @ values).transpose(0, 1).to(q.dtype)
    return out
