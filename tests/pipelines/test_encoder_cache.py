"""`EncoderCache`: cached rows do not reference a larger tensor, so `num_bytes` counts all memory in use."""

from __future__ import annotations

import torch

from penstock.pipelines.encoder_cache import EncoderCache


def test_cached_rows_do_not_reference_the_tensor_of_their_batch() -> None:
    batch = torch.randn(8, 16)
    cache = EncoderCache(max_bytes=1000)
    cache.put(b"a", batch[2:4])
    rows = cache.get(b"a")
    assert rows is not None
    assert torch.equal(rows, batch[2:4])
    assert rows.untyped_storage().nbytes() == cache.num_bytes == 2 * 16 * 4
    cache.put(b"b", whole_tensor := torch.randn(2, 16))
    assert cache.get(b"b") is whole_tensor
