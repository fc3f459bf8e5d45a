"""Attention of encoders: every back end agrees with the reference, and the reference with plain torch."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from support.back_ends import back_end_params, fast_back_ends
from torch import Tensor

from penstock.kernels import Ops
from penstock.kernels.reference import ReferenceOps

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6}
DTYPES = list(TOLERANCES)
LENGTHS_OF_BATCH = {
    "one token": [1],
    "up to 16": [8, 3, 16, 0, 1, 9, 15],
    "up to 16 and 70": [8, 3, 16, 70, 1, 9, 15],
    "short": [5, 70, 3],
    "blocks": [64, 128, 129, 1],
    "chunks": [700],
    "long": [70, 300],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "causal": {"is_causal": True},
    "window of 1": {"window": 1},
    "window of 64": {"window": 64},
    "causal window": {"window": 17, "is_causal": True},
    "window of 14": {"window": 14},
    "window of 15": {"window": 15},
}


@pytest.fixture(params=back_end_params(fast_back_ends()))
def ops(request: pytest.FixtureRequest) -> Ops:
    return fast_back_ends(deterministic=True)[request.param]


def random_batch(
    lengths: list[int], num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return queries, keys and values as slices of one tensor, and the row offsets."""
    torch.manual_seed(0)
    qkv = torch.randn(sum(lengths), num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], 1)
    return q, k, v, torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


SHAPES = [
    ("blocks", 4, 2, 32),
    ("short", 3, 3, 16),
    ("short", 2, 2, 20),
    ("one token", 2, 1, 64),
    ("chunks", 2, 1, 8),
    ("up to 16", 4, 2, 40),
    ("up to 16", 2, 2, 8),
    ("up to 16", 3, 1, 64),
]


@pytest.mark.matrix
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch_name", "num_heads", "num_kv_heads", "head_dim"), SHAPES)
def test_encoder_attention_agrees_with_the_reference(
    ops: Ops,
    dtype: torch.dtype,
    batch_name: str,
    options: str,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    q, k, v, row_offsets = random_batch(
        LENGTHS_OF_BATCH[batch_name], num_heads, num_kv_heads, head_dim, dtype
    )
    for bias in (None, torch.randn(num_heads, 2 * max(LENGTHS_OF_BATCH[batch_name]) + 5)):
        attention_options = {"scale": head_dim**-0.5, "bias": bias, **OPTIONS[options]}
        expected = ReferenceOps().encoder_attention(q, k, v, row_offsets, **attention_options)
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(
            ops.encoder_attention(q, k, v, row_offsets, **attention_options),
            expected,
            rtol=tolerance,
            atol=tolerance,
        )


@pytest.mark.parametrize(
    ("options", "batch_name", "head_dim"),
    [
        *((options, "blocks", 32) for options in OPTIONS),
        ("", "long", 32),
        *(("", "up to 16 and 70", head_dim) for head_dim in (8, 32, 40, 64)),
        ("window of 15", "up to 16 and 70", 32),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_is_bit_equal_alone_and_in_a_batch(
    ops: Ops, dtype: torch.dtype, options: str, batch_name: str, head_dim: int
) -> None:
    attention_options = {"scale": 0.2, **OPTIONS[options]}
    for back_end in (ops, ReferenceOps()):
        q, k, v, row_offsets = random_batch(LENGTHS_OF_BATCH[batch_name], 4, 2, head_dim, dtype)
        for bias in (None, torch.randn(4, 2 * max(LENGTHS_OF_BATCH[batch_name]) + 5)):
            full_result = back_end.encoder_attention(q, k, v, row_offsets, bias=bias, **attention_options)
            for start, stop in pairwise(row_offsets.tolist()):
                single_offsets = torch.tensor([0, stop - start], dtype=torch.int32)
                rows = slice(start, stop)
                single_result = back_end.encoder_attention(
                    q[rows], k[rows], v[rows], single_offsets, bias=bias, **attention_options
                )
                assert torch.equal(single_result, full_result[rows])


def test_the_reference_equals_scaled_dot_product_attention_of_torch() -> None:
    q, k, v, row_offsets = random_batch([9], 4, 2, 8, torch.float32)
    for is_causal in (False, True):
        actual = ReferenceOps().encoder_attention(q, k, v, row_offsets, scale=8**-0.5, is_causal=is_causal)
        reference = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=is_causal, enable_gqa=True
        )
        torch.testing.assert_close(actual, reference.transpose(0, 1))


@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 16)])
def test_window_and_bias_of_the_reference_match_their_definition(num_heads: int, head_dim: int) -> None:
    q, k, v, row_offsets = random_batch([11], num_heads, num_heads, head_dim, torch.float32)
    bias = torch.randn(num_heads, 2 * 13 - 1)
    actual = ReferenceOps().encoder_attention(q, k, v, row_offsets, scale=1.0, window=3, bias=bias)
    for query in range(11):
        for head in range(num_heads):
            visible_keys = range(max(0, query - 3), min(11, query + 4))
            scores = torch.stack(
                [q[query, head] @ k[key, head] + bias[head, key - query + 12] for key in visible_keys]
            )
            torch.testing.assert_close(actual[query, head], scores.softmax(0) @ v[list(visible_keys), head])


def test_given_sequence_blocks_do_not_change_the_result(ops: Ops) -> None:
    q, k, v, row_offsets = random_batch([5, 70], 2, 2, 16, torch.float32)
    result = ops.encoder_attention(q, k, v, row_offsets, scale=1.0)
    blocks = ops.sequence_blocks(row_offsets)
    assert torch.equal(result, ops.encoder_attention(q, k, v, row_offsets, scale=1.0, blocks=blocks))
    other_offsets = random_batch([70, 5], 2, 2, 16, torch.float32)[3]
    other_result = ops.encoder_attention(
        q, k, v, other_offsets, scale=1.0, blocks=ops.sequence_blocks(other_offsets)
    )
    assert torch.equal(other_result, ops.encoder_attention(q, k, v, other_offsets, scale=1.0))
    assert not torch.equal(result, other_result)
