"""Attention in Triton's interpreter: fixed and random head sizes, groups, windows, caches and spans.

`test_interpreter.py` runs this file in a separate process. ``--random -m random`` runs only the random cases,
which include encoder attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_draws import num_examples
from torch import Tensor

from penstock.kernels import LayerKV
from penstock.kernels.cuda.ops import CudaOps
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.spans import ImageSpans

REFERENCE = ReferenceOps()
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


@dataclass(frozen=True)
class AttentionCase:
    """One call of attention over the paged KV cache."""

    head_dim: int = 64
    heads_per_kv_head: int = 1
    """Number of query heads per kv head."""
    num_kv_heads: int = 1
    dtype: torch.dtype = torch.float32
    cache_kind: str = "same"
    """Type of the cache.

    ``same``: the type of the queries; ``wide``: float32; ``int8``, ``fp8``: one scale per row; ``fixed``:
    fp8, one scale per head.
    """
    sequences: tuple[tuple[int, int], ...] = ((1, 20), (7, 19))
    """For each sequence, its number of rows (queries) and its length. A sequence may have no rows."""
    block_size: int = 16
    window: int | None = None
    is_chunked: bool = False
    soft_cap: float | None = None
    has_sinks: bool = False
    num_span_rows: int = 0
    """Number of rows at the end of each sequence with bidirectional attention; 0 for causal attention."""
    is_deterministic: bool = False
    seed: int = 0


def attention_inputs(case: AttentionCase) -> tuple[Tensor, LayerKV, Tensor, Tensor, dict[str, Any]]:
    """Return queries, KV cache, row offsets, lengths and options.

    Slots after the end of a sequence are NaN. In int8, only their scales are NaN.
    """
    torch.manual_seed(case.seed)
    block_counts = [-(-length // case.block_size) for _, length in case.sequences]
    cache = torch.full(
        (2, sum(block_counts) + 1, case.num_kv_heads, case.block_size, case.head_dim), torch.nan
    )
    block_ids = (torch.randperm(sum(block_counts)) + 1).int().split(block_counts)
    block_tables = torch.zeros(len(block_counts), max(block_counts) + 1, dtype=torch.int32)
    for b, (_, length) in enumerate(case.sequences):
        block_tables[b, : block_counts[b]] = block_ids[b]
        for column, block in enumerate(block_ids[b].tolist()):
            num_filled_slots = min(case.block_size, length - case.block_size * column)
            cache[:, block, :, :num_filled_slots] = torch.randn(
                2, case.num_kv_heads, num_filled_slots, case.head_dim
            )
    stored_cache = cache.to(torch.float32 if case.cache_kind == "wide" else case.dtype)
    scales = None
    if case.cache_kind == "int8":
        scales = cache.abs().amax(-1) / 127
        stored_cache = (cache / scales[..., None]).nan_to_num(127).round().to(torch.int8)
    elif case.cache_kind in ("fp8", "fixed"):
        scales = cache.abs().amax(-1) / 448
        if case.cache_kind == "fixed":
            scales = (torch.rand(2, 1, case.num_kv_heads, 1) / 50).expand(scales.shape)
        stored_cache = (cache / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    kv = LayerKV(
        stored_cache,
        block_tables,
        torch.zeros(0, dtype=torch.int64),
        window=case.window,
        scales=scales,
        is_chunked=case.is_chunked,
        has_fixed_scales=case.cache_kind == "fixed",
    )
    row_offsets = torch.tensor([0, *(rows for rows, _ in case.sequences)]).cumsum(0).int()
    lengths = torch.tensor([length for _, length in case.sequences]).int()
    num_heads = case.heads_per_kv_head * case.num_kv_heads
    q = torch.randn(int(row_offsets[-1]), num_heads, case.head_dim + 3).to(case.dtype)[:, :, : case.head_dim]
    options: dict[str, Any] = {"scale": case.head_dim**-0.5, "soft_cap": case.soft_cap}
    if case.has_sinks:
        options["sinks"] = torch.randn(num_heads)
    if case.num_span_rows:
        bounds = []
        for rows, length in case.sequences:
            span_start = max(length - rows, length - case.num_span_rows)
            bounds += [
                (span_start, length) if position >= span_start else (position, position + 1)
                for position in range(length - rows, length)
            ]
        options["spans"] = ImageSpans(torch.tensor(bounds).view(-1, 2).int(), row_offsets, lengths)
    return q, kv, row_offsets, lengths, options


def assert_agrees_with_reference(case: AttentionCase) -> None:
    """Check that the attention of a case agrees with the attention of the reference."""
    ops = CudaOps()
    if case.is_deterministic:
        ops.require_determinism()
    q, kv, row_offsets, lengths, options = attention_inputs(case)
    actual, expected = (
        back_end.attention(q, kv, row_offsets, lengths, **options) for back_end in (ops, REFERENCE)
    )
    assert actual.dtype == expected.dtype
    assert expected.isfinite().all(), "the case is not valid"
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


FIXED_CASES = {
    **{
        f"head of {head_dim}": AttentionCase(head_dim=head_dim, heads_per_kv_head=2)
        for head_dim in (80, 96, 112, 192, 256)
    },
    **{
        f"bfloat16 head of {head_dim}": AttentionCase(
            head_dim=head_dim, heads_per_kv_head=3, dtype=torch.bfloat16, cache_kind="int8"
        )
        for head_dim in (80, 112, 192)
    },
    **{
        f"group of {heads_per_kv_head}": AttentionCase(
            head_dim=16, heads_per_kv_head=heads_per_kv_head, num_kv_heads=2
        )
        for heads_per_kv_head in (3, 5, 7, 12)
    },
    **{
        f"{cache_kind} head of {head_dim}": AttentionCase(
            head_dim=head_dim, heads_per_kv_head=2, num_kv_heads=3, dtype=dtype, cache_kind=cache_kind
        )
        for head_dim, dtype in ((80, torch.bfloat16), (128, torch.float16), (192, torch.float32))
        for cache_kind in ("fp8", "fixed")
    },
    "spans in a window with fp8": AttentionCase(
        window=4, num_span_rows=6, cache_kind="fp8", sequences=((8, 30), (1, 9))
    ),
    "sinks, soft cap and fixed scales": AttentionCase(
        soft_cap=3.0, has_sinks=True, cache_kind="fixed", heads_per_kv_head=5, head_dim=80
    ),
    "splits with fp8": AttentionCase(
        window=530, cache_kind="fp8", sequences=((1, 1100), (1, 30)), head_dim=16
    ),
    "window beyond the context": AttentionCase(window=500, sequences=((1, 20), (9, 33))),
    "window of one key": AttentionCase(window=1, sequences=((1, 20), (9, 33))),
    "chunks beyond the context": AttentionCase(window=64, is_chunked=True, sequences=((1, 20), (9, 33))),
    "spans in a window": AttentionCase(window=4, num_span_rows=6, sequences=((8, 30), (1, 9))),
    "spans with int8": AttentionCase(num_span_rows=5, cache_kind="int8", sequences=((8, 30), (7, 7))),
    "sinks, soft cap and int8": AttentionCase(
        soft_cap=3.0, has_sinks=True, cache_kind="int8", heads_per_kv_head=5, head_dim=80
    ),
    "sinks and window": AttentionCase(has_sinks=True, window=3, heads_per_kv_head=2),
    "sinks and splits": AttentionCase(
        has_sinks=True, soft_cap=4.0, sequences=((1, 600), (1, 30)), head_dim=16
    ),
    "window and splits": AttentionCase(window=530, sequences=((1, 1100), (1, 30)), head_dim=16),
    "no rows at the start": AttentionCase(sequences=((0, 8), (3, 12), (1, 5))),
    "no rows in the middle": AttentionCase(sequences=((3, 12), (0, 40), (0, 3), (1, 5)), heads_per_kv_head=3),
    "no rows at the end": AttentionCase(sequences=((17, 17), (0, 40))),
    "no rows in the batch": AttentionCase(sequences=((0, 8), (0, 12))),
    "sequence without rows and split keys": AttentionCase(
        sequences=((1, 600), (0, 520), (1, 9)), head_dim=16
    ),
    "float16 queries, float32 cache": AttentionCase(
        dtype=torch.float16, cache_kind="wide", head_dim=96, heads_per_kv_head=2
    ),
    "blocks of 64": AttentionCase(block_size=64, sequences=((5, 130), (1, 64))),
    "deterministic": AttentionCase(
        is_deterministic=True, head_dim=80, heads_per_kv_head=3, window=40, sequences=((20, 70), (1, 9))
    ),
}


@pytest.mark.parametrize("name", FIXED_CASES)
def test_fixed_cases_agree_with_the_reference(name: str) -> None:
    assert_agrees_with_reference(FIXED_CASES[name])


@st.composite
def random_cases(draw: st.DrawFn) -> AttentionCase:
    """Draw a small case, because the interpreter is slow."""

    def sequence() -> tuple[int, int]:
        length = draw(st.integers(1, 70))
        return draw(st.sampled_from([0, 1, 1, min(length, 5), length])), length

    sequences = tuple(sequence() for _ in range(draw(st.integers(1, 4))))
    window = draw(st.sampled_from([None, None, 1, 7, 33, 64, 500]))
    is_chunked = window is not None and draw(st.booleans())
    return AttentionCase(
        head_dim=draw(st.sampled_from([16, 24, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256])),
        heads_per_kv_head=draw(st.sampled_from([1, 2, 3, 5, 6, 7, 8, 12, 16])),
        num_kv_heads=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        cache_kind=draw(st.sampled_from(["same", "wide", "int8", "fp8", "fixed"])),
        sequences=sequences,
        block_size=draw(st.sampled_from([16, 32, 64])),
        window=window,
        is_chunked=is_chunked,
        soft_cap=draw(st.sampled_from([None, None, 2.0, 50.0])),
        has_sinks=draw(st.booleans()),
        num_span_rows=0 if is_chunked else draw(st.sampled_from([0, 0, 4, 20])),
        is_deterministic=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@pytest.mark.random
@settings(max_examples=num_examples(8))
@given(case=random_cases())
def test_random_cases_agree_with_the_reference(case: AttentionCase) -> None:
    assert_agrees_with_reference(case)


def test_soft_cap_sinks_spans_and_window_change_the_result() -> None:
    """If an option did not change the result, a kernel that ignores the option would pass the other tests."""
    case = AttentionCase(has_sinks=True, window=3, soft_cap=2.0, num_span_rows=4, sequences=((8, 30), (1, 9)))
    q, kv, row_offsets, lengths, options = attention_inputs(case)
    full_result = CudaOps().attention(q, kv, row_offsets, lengths, **options)
    for name in ("soft_cap", "sinks", "spans"):
        result_without_option = CudaOps().attention(q, kv, row_offsets, lengths, **(options | {name: None}))
        assert not torch.allclose(full_result, result_without_option, atol=1e-3), name
    result_without_option = CudaOps().attention(q, replace(kv, window=None), row_offsets, lengths, **options)
    assert not torch.allclose(full_result, result_without_option, atol=1e-3)


@pytest.mark.random
@settings(max_examples=num_examples(6))
@given(
    head_dim=st.sampled_from([16, 40, 64, 80, 96, 112, 128, 192, 256]),
    heads_per_kv_head=st.sampled_from([1, 2, 3, 5]),
    num_kv_heads=st.integers(1, 2),
    dtype=st.sampled_from(list(TOLERANCE)),
    rows=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any),
    window=st.sampled_from([None, 1, 5, 100]),
    is_causal=st.booleans(),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_random_encoder_batches_agree_with_the_reference(
    head_dim: int,
    heads_per_kv_head: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    rows: list[int],
    window: int | None,
    is_causal: bool,
    has_bias: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    row_offsets = torch.tensor([0, *rows]).cumsum(0).int()
    num_heads = heads_per_kv_head * num_kv_heads
    q, k, v = (
        torch.randn(sum(rows), num_heads + 2 * num_kv_heads, head_dim)
        .to(dtype)
        .split([num_heads, num_kv_heads, num_kv_heads], 1)
    )
    bias = torch.randn(num_heads, 2 * 40 + 1) if has_bias else None
    actual, expected = (
        back_end.encoder_attention(
            q, k, v, row_offsets, scale=head_dim**-0.5, window=window, is_causal=is_causal, bias=bias
        )
        for back_end in (CudaOps(), REFERENCE)
    )
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)
