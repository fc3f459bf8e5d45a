"""Lazily packed weights: packing runs once, on request, and does not change products in float encodings."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels import LazyWeight, PackedLinear
from penstock.kernels.cpu import linear, variants
from penstock.kernels.cpu.ops import CpuOps

VARIANTS = {ops.isa: ops for ops in variants()}


@pytest.fixture(params=VARIANTS or [pytest.param("none", marks=pytest.mark.skip("no kernels are built"))])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    torch.manual_seed(0)
    return VARIANTS[request.param]


def get_lazy_weight(packed: PackedLinear) -> LazyWeight:
    assert isinstance(packed.tensors, LazyWeight)
    return packed.tensors


@pytest.mark.matrix
@pytest.mark.parametrize("stored_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("encoding", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 33, 300])
@pytest.mark.parametrize("part_sizes", [(70,), (64, 128, 1), (640, 64), (33, 100, 7)], ids=str)
def test_products_before_and_after_packing_are_bit_equal(
    ops: CpuOps,
    stored_dtype: torch.dtype,
    encoding: str,
    num_rows: int,
    part_sizes: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "_MAX_SLICE_BYTES", 64 * 81 * 4 * 2)  # products pack 2 or 3 panels at a time
    # the rows are strided and unaligned
    weights = [torch.randn(size, 90).to(stored_dtype)[:, 3:84] for size in part_sizes]
    dtype = getattr(torch, encoding)
    x, bias = torch.randn(num_rows, 85).to(dtype)[:, 4:], torch.randn(sum(part_sizes))
    packed_weight = ops.pack_lazily(weights, encoding, bias=bias)
    expected = ops.linear(x, ops.pack_linear(weights, encoding, bias=bias))
    assert torch.equal(ops.linear(x, packed_weight), expected)
    assert len(get_lazy_weight(packed_weight).parts) == len(part_sizes), "the weight is not packed yet"
    assert set(packed_weight.tensors) == {"panels"}
    assert not get_lazy_weight(packed_weight).parts
    assert torch.equal(ops.linear(x, packed_weight), expected)


def test_a_lazy_weight_is_packed_once(ops: CpuOps) -> None:
    packed_weight, release_calls = ops.pack_lazily([torch.randn(70, 33)], "float32"), []
    get_lazy_weight(packed_weight).release = lambda: release_calls.append(1)
    panels = packed_weight.tensors["panels"]
    assert packed_weight.tensors["panels"] is panels
    assert get_lazy_weight(packed_weight).pack()["panels"] is panels
    assert packed_weight.tensors.get("scales") is None
    assert len(packed_weight.tensors) == 1
    assert release_calls == [1]


def test_products_use_floats_until_the_weight_is_quantized(ops: CpuOps) -> None:
    weight, x = torch.randn(70, 33), torch.randn(5, 33)
    for encoding in ("int8", "int5", "int4"):
        packed_weight = ops.pack_lazily([weight], encoding)
        assert torch.equal(ops.linear(x, packed_weight), ops.linear(x, ops.pack_linear(weight, "float32")))
        get_lazy_weight(packed_weight).pack()
        assert torch.equal(ops.linear(x, packed_weight), ops.linear(x, ops.pack_linear(weight, encoding)))
    packed_weight = ops.pack_lazily([weight], "bfloat16")
    expected = ops.linear(x, ops.pack_linear(weight, "bfloat16"))
    assert torch.equal(ops.linear(x, packed_weight), expected), "a float encoding needs no quantization"


def test_transposed_weights_are_packed_lazily(ops: CpuOps) -> None:
    weight, x = torch.randn(33, 700).T, torch.randn(5, 33)
    packed_weight = ops.pack_lazily([weight], "float32")
    expected = ops.linear(x, ops.pack_linear(weight, "float32"))
    assert torch.equal(ops.linear(x, packed_weight), expected)
    assert set(packed_weight.tensors) == {"panels"}
    assert torch.equal(ops.linear(x, packed_weight), expected)


def test_encodings_without_panels_are_packed_at_once(ops: CpuOps) -> None:
    assert not isinstance(ops.pack_lazily([torch.randn(70, 33)], "float16").tensors, LazyWeight)
