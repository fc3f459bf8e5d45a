"""Weights in rows are multiplied as they are in panels, to the bit, and packed when somebody asks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels import Deferred, PackedLinear
from penstock.kernels.cpu import CpuOps, linear, variants

VARIANTS = {ops.isa: ops for ops in variants()}


@pytest.fixture(params=VARIANTS or [pytest.param("none", marks=pytest.mark.skip("no kernels are built"))])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    torch.manual_seed(0)
    return VARIANTS[request.param]


def deferred(packed: PackedLinear) -> Deferred:
    assert isinstance(packed.tensors, Deferred)
    return packed.tensors


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("encoding", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [0, 1, 5, 33, 300])
@pytest.mark.parametrize("sizes", [(70,), (64, 128, 1), (640, 64), (33, 100, 7)], ids=str)
def test_rows_and_panels_give_the_same_bits(
    ops: CpuOps,
    stored: torch.dtype,
    encoding: str,
    rows: int,
    sizes: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "_SLICE_BYTES", 64 * 81 * 4 * 2)  # two panels at a time, or four
    parts = [torch.randn(size, 90).to(stored)[:, 3:84] for size in sizes]  # rows apart, and not aligned
    dtype = getattr(torch, encoding)
    x, bias = torch.randn(rows, 85).to(dtype)[:, 4:], torch.randn(sum(sizes))
    packed = ops.pack_later(parts, encoding, bias=bias)
    expected = ops.linear(x, ops.pack_linear(parts, encoding, bias=bias))
    assert torch.equal(ops.linear(x, packed), expected)
    assert len(deferred(packed).parts) == len(sizes), "it is not packed yet"
    assert set(packed.tensors) == {"panels"}
    assert not deferred(packed).parts
    assert torch.equal(ops.linear(x, packed), expected)


def test_it_is_packed_once(ops: CpuOps) -> None:
    packed, calls = ops.pack_later([torch.randn(70, 33)], "float32"), []
    deferred(packed).on_packed = lambda: calls.append(1)
    panels = packed.tensors["panels"]
    assert packed.tensors["panels"] is panels
    assert deferred(packed).pack()["panels"] is panels
    assert packed.tensors.get("scales") is None
    assert len(packed.tensors) == 1
    assert calls == [1]


def test_integers_do_not_wait(ops: CpuOps) -> None:
    weight: list[Tensor] = [torch.randn(70, 33)]
    for encoding in ("int8", "int4", "float16"):
        assert not isinstance(ops.pack_later(weight, encoding).tensors, Deferred)
