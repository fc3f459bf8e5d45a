"""The bits of a row do not depend on its batch, prefill chunk, KV block size or the number of threads."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from penstock.kernels import LayerKV
from penstock.kernels.cpu import variants
from penstock.kernels.cpu.ops import CpuOps

LENGTH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 1200, 4, 2, 32  # more keys than two key chunks of the kernel

VARIANTS = {ops.isa: ops for ops in variants()}


@pytest.fixture(params=VARIANTS or [pytest.param("none", marks=pytest.mark.skip("no kernels are built"))])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return VARIANTS[request.param]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    return request.param


def random_sequence(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return queries ``[T, H, D]``, and keys and values ``[2, K, T, D]``, of one sequence."""
    return torch.randn(LENGTH, NUM_HEADS, HEAD_DIM).to(dtype), torch.randn(
        2, NUM_KV_HEADS, LENGTH, HEAD_DIM
    ).to(dtype)


def attend_ranges(
    ops: CpuOps,
    queries: Tensor,
    keys_and_values: Tensor,
    ranges: list[slice],
    block_size: int,
    window: int | None,
    *,
    is_int8: bool,
) -> Tensor:
    """Return the attention of ranges of the sequence, each passed as a sequence of the batch."""
    num_blocks = -(-LENGTH // block_size)
    padded_keys_and_values = torch.nn.functional.pad(
        keys_and_values, (0, 0, 0, num_blocks * block_size - LENGTH)
    )
    cache = (
        padded_keys_and_values.view(2, NUM_KV_HEADS, num_blocks, block_size, HEAD_DIM)
        .transpose(1, 2)
        .contiguous()
    )
    scales = None
    if is_int8:
        scales = cache.float().abs().amax(-1).clamp_min(1e-12) / 127
        cache = (cache / scales[..., None]).round().to(torch.int8)
    block_tables = torch.arange(num_blocks).repeat(len(ranges), 1).int()
    row_counts = [row_range.stop - row_range.start for row_range in ranges]
    row_offsets = torch.tensor([0, *row_counts]).cumsum(0).int()
    lengths = torch.tensor([row_range.stop for row_range in ranges]).int()
    q = torch.cat([queries[row_range] for row_range in ranges])
    kv = LayerKV(cache, block_tables, torch.empty(0, dtype=torch.int64), window, scales)
    return ops.attention(q, kv, row_offsets, lengths, scale=HEAD_DIM**-0.5)


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("window", [None, 100, 700])
def test_attention_is_bit_equal_whole_in_chunks_and_by_row(
    ops: CpuOps, dtype: torch.dtype, window: int | None, is_int8: bool
) -> None:
    queries, keys_and_values = random_sequence(dtype)
    attend = partial(attend_ranges, is_int8=is_int8)
    full_result = attend(ops, queries, keys_and_values, [slice(0, LENGTH)], 32, window)
    boundaries = [0, 7, 300, 301, 700, LENGTH]
    chunks = [slice(start, stop) for start, stop in pairwise(boundaries)]
    assert torch.equal(attend(ops, queries, keys_and_values, chunks, 32, window), full_result)
    assert torch.equal(attend(ops, queries, keys_and_values, chunks, 128, window), full_result)
    for row in (0, 63, 64, 511, 512, 700, LENGTH - 1):
        single_rows = attend(ops, queries, keys_and_values, [slice(row, row + 1)], 16, window)
        assert torch.equal(single_rows[0], full_result[row])
    assert not torch.equal(attend(ops, queries, keys_and_values, chunks, 32, 99), full_result)


def test_attention_with_large_scores_is_bit_equal_batched_and_by_row(ops: CpuOps, dtype: torch.dtype) -> None:
    """With large scores, another order of additions changes the result."""
    queries, keys_and_values = random_sequence(dtype)
    attend = partial(
        attend_ranges, ops, 3 * queries, keys_and_values, block_size=32, window=None, is_int8=False
    )
    single_rows = attend(ranges=[slice(row, row + 1) for row in range(LENGTH)])
    assert torch.equal(attend(ranges=[slice(0, LENGTH)]), single_rows)


@pytest.mark.usefixtures("_restore_num_threads")
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("ranges", [[slice(LENGTH - 1, LENGTH)], [slice(1100, LENGTH), slice(600, 602)]])
def test_attention_is_bit_equal_on_any_number_of_threads(
    ops: CpuOps, dtype: torch.dtype, ranges: list[slice], is_int8: bool
) -> None:
    queries, keys_and_values = random_sequence(dtype)
    results = []
    for num_threads in (1, 2, 5):  # with several threads and few queries, each chunk of keys is a task
        torch.set_num_threads(num_threads)
        results.append(attend_ranges(ops, queries, keys_and_values, ranges, 32, None, is_int8=is_int8))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.usefixtures("_restore_num_threads")
@pytest.mark.parametrize(("out_features", "in_features"), [(1030, 520), (64, 2051), (7, 3)])
def test_linear_rows_are_bit_equal_alone_and_in_a_batch(
    ops: CpuOps, dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    weight, bias = torch.randn(out_features, in_features), torch.randn(out_features)
    packed_weight = ops.pack_linear(weight, str(dtype).removeprefix("torch."), bias=bias)
    x = torch.randn(600, in_features + 3).to(dtype)[:, 1:-2]
    batch_result = ops.linear(x, packed_weight)
    torch.set_num_threads(2)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 13, 24, 31, 32, 33, 100, 253):
        assert torch.equal(ops.linear(x[:num_rows], packed_weight), batch_result[:num_rows])
        assert torch.equal(ops.linear(x[-num_rows:], packed_weight), batch_result[-num_rows:])


@pytest.mark.usefixtures("_restore_num_threads")
@pytest.mark.parametrize("encoding", ["bfloat16", "int8", "int4", "fp8"])
def test_linear_with_few_panels_is_bit_equal_on_any_number_of_threads(ops: CpuOps, encoding: str) -> None:
    """The weight has 3 panels, so that the rows are divided into more chunks if there are 2 or 5 threads."""
    torch.manual_seed(0)
    packed_weight = ops.pack_linear(torch.randn(150, 200), encoding)
    for num_rows in (47, 48, 104, 300):
        x = torch.randn(num_rows, 200).bfloat16()
        torch.set_num_threads(1)
        expected = ops.linear(x, packed_weight)
        for num_threads in (2, 5):
            torch.set_num_threads(num_threads)
            assert torch.equal(ops.linear(x, packed_weight), expected)


@pytest.mark.parametrize("scale", [1e-22, 1e-19, 1e18])
def test_products_near_the_float32_limits_are_bit_equal_alone_and_in_a_batch(
    ops: CpuOps, scale: float
) -> None:
    """Products reach denormal numbers and infinity.

    Different instructions may compute one row and several rows.
    """
    torch.manual_seed(1)
    packed_weight = ops.pack_linear(torch.randn(70, 333) * scale, "bfloat16")
    x = (torch.randn(40, 333) * scale * torch.randn(40, 1).exp()).bfloat16()
    batch_result = ops.linear(x, packed_weight)
    single_rows = torch.cat([ops.linear(row[None], packed_weight) for row in x])
    assert torch.equal(batch_result.isnan(), single_rows.isnan())
    assert torch.equal(batch_result.nan_to_num(7), single_rows.nan_to_num(7))
    assert batch_result.isfinite().any()


@pytest.mark.usefixtures("_restore_num_threads")
def test_row_operations_are_bit_equal_on_any_number_of_threads(ops: CpuOps, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 300, 512).to(dtype)
    weight = torch.randn(512)
    results = []
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        normalized, total = ops.add_rms_norm(x, residual, weight, 1e-5)
        results.append(torch.cat([normalized, total, ops.gated_activation(x, "silu").repeat(1, 2)]))
    assert torch.equal(*results)
