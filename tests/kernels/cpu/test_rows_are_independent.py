"""A row's bits do not depend on its batch, its chunk, the block size or the number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from penstock.kernels import LayerKV
from penstock.kernels.cpu import variants
from penstock.kernels.cpu.ops import CpuOps

LENGTH, HEADS, KV_HEADS, DIM = 1200, 4, 2, 32  # more keys than two chunks of the kernel

VARIANTS = {ops.isa: ops for ops in variants()}


@pytest.fixture(params=VARIANTS or [pytest.param("none", marks=pytest.mark.skip("no kernels are built"))])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return VARIANTS[request.param]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    return request.param


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def sequence(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries ``[T, H, D]``, and keys and values ``[2, K, T, D]``, of one sequence."""
    return torch.randn(LENGTH, HEADS, DIM).to(dtype), torch.randn(2, KV_HEADS, LENGTH, DIM).to(dtype)


def attend_pieces(
    ops: CpuOps,
    queries: Tensor,
    pairs: Tensor,
    pieces: list[slice],
    block_size: int,
    window: int | None,
    *,
    in_bytes: bool,
) -> Tensor:
    """Attention of pieces of the sequence, each as if it were a sequence of the batch."""
    blocks = -(-LENGTH // block_size)
    padded = torch.nn.functional.pad(pairs, (0, 0, 0, blocks * block_size - LENGTH))
    cache = padded.view(2, KV_HEADS, blocks, block_size, DIM).transpose(1, 2).contiguous()
    scales = None
    if in_bytes:
        scales = cache.float().abs().amax(-1).clamp_min(1e-12) / 127
        cache = (cache / scales[..., None]).round().to(torch.int8)
    tables = torch.arange(blocks).repeat(len(pieces), 1).int()
    counts = torch.tensor([0] + [piece.stop - piece.start for piece in pieces])
    lengths = torch.tensor([piece.stop for piece in pieces]).int()
    q = torch.cat([queries[piece] for piece in pieces])
    kv = LayerKV(cache, tables, torch.empty(0, dtype=torch.int64), window, scales)
    return ops.attention(q, kv, counts.cumsum(0).int(), lengths, scale=DIM**-0.5)


@pytest.mark.parametrize("in_bytes", [False, True])
@pytest.mark.parametrize("window", [None, 100, 700])
def test_attention_whole_in_chunks_and_one_by_one(
    ops: CpuOps, dtype: torch.dtype, window: int | None, in_bytes: bool
) -> None:
    queries, pairs = sequence(dtype)
    attend = partial(attend_pieces, in_bytes=in_bytes)
    whole = attend(ops, queries, pairs, [slice(0, LENGTH)], 32, window)
    cuts = [0, 7, 300, 301, 700, LENGTH]
    chunks = [slice(a, b) for a, b in pairwise(cuts)]
    assert torch.equal(attend(ops, queries, pairs, chunks, 32, window), whole)
    assert torch.equal(attend(ops, queries, pairs, chunks, 128, window), whole)
    for row in (0, 63, 64, 511, 512, 700, LENGTH - 1):
        alone = attend(ops, queries, pairs, [slice(row, row + 1)], 16, window)
        assert torch.equal(alone[0], whole[row])
    assert not torch.equal(attend(ops, queries, pairs, chunks, 32, 99), whole)


def test_attention_of_many_queries_and_of_each_alone(ops: CpuOps, dtype: torch.dtype) -> None:
    """Large scores: then another order of the additions of a score changes the result."""
    queries, pairs = sequence(dtype)
    attend = partial(attend_pieces, ops, 3 * queries, pairs, block_size=32, window=None, in_bytes=False)
    alone = attend(pieces=[slice(row, row + 1) for row in range(LENGTH)])
    assert torch.equal(attend(pieces=[slice(0, LENGTH)]), alone)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("in_bytes", [False, True])
@pytest.mark.parametrize("pieces", [[slice(LENGTH - 1, LENGTH)], [slice(1100, LENGTH), slice(600, 602)]])
def test_attention_on_one_thread_and_on_several(
    ops: CpuOps, dtype: torch.dtype, pieces: list[slice], in_bytes: bool
) -> None:
    queries, pairs = sequence(dtype)
    results = []
    for threads in (1, 2, 5):  # with 2 or more threads, the chunks of keys of few items are separate tasks
        torch.set_num_threads(threads)
        results.append(attend_pieces(ops, queries, pairs, pieces, 32, None, in_bytes=in_bytes))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("outputs", "inputs"), [(1030, 520), (64, 2051), (7, 3)])
def test_linear_alone_and_in_a_batch(ops: CpuOps, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    packed = ops.pack_linear(weight, str(dtype).removeprefix("torch."), bias=bias)
    x = torch.randn(600, inputs + 3).to(dtype)[:, 1:-2]
    together = ops.linear(x, packed)
    torch.set_num_threads(2)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 24, 31, 32, 33, 100, 253):
        assert torch.equal(ops.linear(x[:rows], packed), together[:rows])
        assert torch.equal(ops.linear(x[-rows:], packed), together[-rows:])


@pytest.mark.parametrize("scale", [1e-22, 1e-19, 1e18])
def test_products_near_the_limits_of_float32_alone_and_in_a_batch(ops: CpuOps, scale: float) -> None:
    """Denormal numbers and infinity: one row and several rows may be computed by different instructions."""
    torch.manual_seed(1)
    packed = ops.pack_linear(torch.randn(70, 333) * scale, "bfloat16")
    x = (torch.randn(40, 333) * scale * torch.randn(40, 1).exp()).bfloat16()
    together = ops.linear(x, packed)
    alone = torch.cat([ops.linear(row[None], packed) for row in x])
    assert torch.equal(together.isnan(), alone.isnan())
    assert torch.equal(together.nan_to_num(7), alone.nan_to_num(7))
    assert together.isfinite().any()


@pytest.mark.usefixtures("_threads")
def test_rows_on_one_thread_and_on_several(ops: CpuOps, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 300, 512).to(dtype)
    weight = torch.randn(512)
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
        results.append(torch.cat([normed, total, ops.gated_activation(x, "silu").repeat(1, 2)]))
    assert torch.equal(*results)
