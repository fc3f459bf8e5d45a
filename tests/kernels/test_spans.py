"""Attention with spans: the tokens of an image attend to each other in both directions."""

from __future__ import annotations

import pytest
import torch

from penstock.driver import CPU
from penstock.engine import InferenceSession
from penstock.kernels import Ops
from penstock.kernels.inputs import LayerKV
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.spans import ImageSpans

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 16, 16
BATCH = [(0, 70, [(3, 20), (21, 60)]), (33, 40, [(33, 38)]), (8, 9, []), (0, 50, [(0, 50)]), (20, 45, [])]
"""For each sequence: start and end of its rows, and the token ranges of its images."""


def random_batch(
    window: int | None,
) -> tuple[torch.Tensor, LayerKV, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, KV cache, row offsets, lengths and spans of `BATCH`."""
    torch.manual_seed(0)
    row_counts = torch.tensor([end - start for start, end, _ in BATCH])
    block_tables = 1 + torch.randperm(5 * len(BATCH)).view(len(BATCH), 5).int()
    cache = torch.randn(2, 5 * len(BATCH) + 1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    spans = []
    for start, end, image_ranges in BATCH:
        rows = torch.arange(start, end)
        row_spans = torch.stack([rows, rows + 1], 1)
        for image_start, image_end in image_ranges:
            row_spans[(rows >= image_start) & (rows < image_end)] = torch.tensor([image_start, image_end])
        spans.append(row_spans)
    row_offsets = torch.cat([torch.zeros(1), row_counts.cumsum(0)]).int()
    lengths = torch.tensor([end for _, end, _ in BATCH]).int()
    kv = LayerKV(cache, block_tables, torch.zeros(0).long(), window)
    return (
        torch.randn(int(row_counts.sum()), NUM_HEADS, HEAD_DIM),
        kv,
        row_offsets,
        lengths,
        torch.cat(spans).int(),
    )


@pytest.mark.parametrize("window", [None, 7, 30])
@pytest.mark.parametrize("ops", [ReferenceOps(), InferenceSession([CPU()]).ops], ids=["reference", "best"])
def test_a_row_attends_to_its_window_and_its_image(ops: Ops, window: int | None) -> None:
    """A row sees the keys of its window up to its position, and the later keys of its image."""
    q, kv, row_offsets, lengths, spans = random_batch(window)
    image_spans = ImageSpans(spans, row_offsets, lengths)
    attended = ops.attention(q, kv, row_offsets, lengths, scale=0.3, spans=image_spans)
    row = 0
    for sequence, (start, end, _) in enumerate(BATCH):
        keys, values = kv.cache[:, kv.block_tables[sequence].long()].transpose(2, 3).flatten(1, 2)
        for position in range(start, end):
            first_key = 0 if window is None else max(0, position - window + 1)
            visible_keys = slice(first_key, int(spans[row, 1]))
            scores = torch.einsum("hd,nhd->hn", q[row], keys[visible_keys].repeat_interleave(3, 1)) * 0.3
            expected = torch.einsum(
                "hn,nhd->hd", scores.softmax(-1), values[visible_keys].repeat_interleave(3, 1)
            )
            torch.testing.assert_close(attended[row], expected, atol=1e-5, rtol=0)
            row += 1
