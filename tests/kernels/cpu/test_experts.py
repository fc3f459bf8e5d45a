"""Experts in one call: the bits of the same operations, one expert after the other."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels import ClampedSwiGLU, Gating, LoRAInputs, PackedExperts, PackedLinear, encoding_named
from penstock.kernels.cpu import variants
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.reference import ReferenceOps

VARIANTS = {ops.isa: ops for ops in variants()}
GATINGS: tuple[Gating, ...] = ("silu", "gelu", "gelu_tanh", "relu", ClampedSwiGLU(1.702, 1.5))


@pytest.fixture(params=VARIANTS or [pytest.param("none", marks=pytest.mark.skip("no kernels are built"))])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    torch.manual_seed(0)
    return VARIANTS[request.param]


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def packed(
    ops: CpuOps,
    experts: int,
    hidden: int,
    inner: int,
    encoding: str,
    down_encoding: str = "",
    *,
    bias: bool = True,
) -> PackedExperts:
    def linears(out_features: int, in_features: int, encoding: str) -> tuple[PackedLinear, ...]:
        weights = torch.randn(experts, out_features, in_features) / in_features**0.5
        biases = torch.randn(experts, out_features)
        return tuple(
            ops.pack_linear(one, encoding, bias=other if bias else None)
            for one, other in zip(weights, biases, strict=True)
        )

    return PackedExperts(
        linears(2 * inner, hidden, encoding), linears(hidden, inner, down_encoding or encoding)
    )


def routed(rows: int, experts: int, top: int) -> tuple[Tensor, Tensor]:
    return ReferenceOps().route(torch.randn(rows, experts) * 2, top, "all")


def one_by_one(
    ops: CpuOps, x: Tensor, experts: PackedExperts, topk_weights: Tensor, topk_ids: Tensor, gating: Gating
) -> Tensor:
    """Compute the experts one after the other with the kernels of linear layers and gates."""
    return ReferenceOps.experts(ops, x, experts, topk_weights, topk_ids, gating)


def activations(rows: int, width: int, encoding: str) -> Tensor:
    """Return activations ``[rows, width]`` whose rows have gaps between them in memory."""
    return torch.randn(rows, width + 24).to(encoding_named(encoding).compute_dtype.to_torch())[:, :width]


@pytest.mark.matrix
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int5", "int4", "uint4", "uint8", "fp8"])
def test_any_number_of_rows(ops: CpuOps, encoding: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = packed(ops, 7, 72, 100, encoding, bias=bias)
    cases = []
    for rows in (*range(1, 41), 0, 300, 800):
        x, gating = activations(rows, 72, encoding), GATINGS[rows % 5]
        topk_weights, topk_ids = routed(rows, 7, 1 + rows % 7)
        cases.append(
            (
                x,
                experts,
                topk_weights,
                topk_ids,
                gating,
                one_by_one(ops, x, experts, topk_weights, topk_ids, gating),
            )
        )
    monkeypatch.delattr(ReferenceOps, "experts")  # the kernels must not call it
    for *given, expected in cases:
        got = ops.experts(*given)
        assert torch.equal(got, expected)
        assert got.dtype == expected.dtype


@pytest.mark.matrix
@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int5", "int4"])
@pytest.mark.parametrize("gating", GATINGS, ids=[*GATINGS[:-1], "clamped"])  # type: ignore[list-item]
def test_every_gate(ops: CpuOps, encoding: str, gating: Gating) -> None:
    experts, x = packed(ops, 3, 64, 64, encoding), activations(5, 64, encoding)
    topk_weights, topk_ids = routed(5, 3, 2)
    got = ops.experts(x, experts, topk_weights, topk_ids, gating)
    assert torch.equal(got, one_by_one(ops, x, experts, topk_weights, topk_ids, gating))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("encoding", "down_encoding"), [("int8", "int8"), ("int4", "int8"), ("int8", "int4")]
)
def test_layers_in_different_encodings(
    ops: CpuOps, encoding: str, down_encoding: str, dtype: torch.dtype
) -> None:
    """Activations are float32 or bfloat16."""
    experts = packed(ops, 4, 130, 40, encoding, down_encoding, bias=False)
    x = torch.randn(9, 130).to(dtype)
    topk_weights, topk_ids = routed(9, 4, 2)
    got = ops.experts(x, experts, topk_weights, topk_ids, "silu")
    assert torch.equal(got, one_by_one(ops, x, experts, topk_weights, topk_ids, "silu"))


@pytest.mark.matrix(strength=1, times=2)
@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int5", "int4"])
@pytest.mark.usefixtures("_threads")
def test_wide_experts_on_any_number_of_threads(ops: CpuOps, encoding: str) -> None:
    """The layers have more panels than a task and more inputs than a block of the kernel."""
    experts = packed(ops, 3, 1100, 700, encoding)
    for rows in (1, 2, 30):
        x, (topk_weights, topk_ids) = activations(rows, 1100, encoding), routed(rows, 3, 2)
        expected = one_by_one(ops, x, experts, topk_weights, topk_ids, "silu")
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(ops.experts(x, experts, topk_weights, topk_ids, "silu"), expected)


@pytest.mark.parametrize("encoding", ["float32", "int4"])
@pytest.mark.usefixtures("_threads")
def test_more_assignments_than_one_pass_holds(ops: CpuOps, encoding: str) -> None:
    rows, experts = 3100, packed(ops, 6, 128, 256, encoding)
    x, (topk_weights, topk_ids) = activations(rows, 128, encoding), routed(rows, 6, 4)
    topk_ids[:, 0], topk_ids[:1000, 1:] = (
        5,
        torch.tensor([0, 1, 3]),
    )  # unsorted; all rows use expert 5
    topk_ids[1000:, 1:] = torch.tensor([3, 1, 4])
    expected = one_by_one(ops, x, experts, topk_weights, topk_ids, "silu")
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(ops.experts(x, experts, topk_weights, topk_ids, "silu"), expected)


def test_all_rows_use_one_expert(ops: CpuOps) -> None:
    experts = packed(ops, 128, 64, 32, "bfloat16")
    for rows in (1, 6, 7, 240, 241, 500):
        x, topk_ids = activations(rows, 64, "bfloat16"), torch.full((rows, 1), 77)
        topk_weights = torch.rand(rows, 1)
        got = ops.experts(x, experts, topk_weights, topk_ids, "silu")
        assert torch.equal(got, one_by_one(ops, x, experts, topk_weights, topk_ids, "silu"))


def test_strided_topk_weights_and_topk_ids(ops: CpuOps) -> None:
    experts, x = packed(ops, 6, 64, 64, "float32"), activations(20, 64, "float32")
    topk_weights, topk_ids = (tensor[:, 1:3] for tensor in routed(20, 6, 4))
    got = ops.experts(x, experts, topk_weights, topk_ids, "silu")
    assert torch.equal(got, one_by_one(ops, x, experts, topk_weights.clone(), topk_ids.clone(), "silu"))


@pytest.mark.parametrize("bad", [-1, 6, 1 << 40])
@pytest.mark.parametrize("rows", [2, 60])
def test_an_invalid_expert_id_is_refused(ops: CpuOps, bad: int, rows: int) -> None:
    experts, x = packed(ops, 6, 64, 64, "float32"), activations(rows, 64, "float32")
    topk_weights, topk_ids = routed(rows, 6, 3)
    topk_ids[1, 2] = bad
    with pytest.raises(IndexError, match=f"expert {bad} of 6"):
        ops.experts(x, experts, topk_weights, topk_ids, "silu")


def test_unsupported_arguments_fall_back_to_the_reference(ops: CpuOps) -> None:
    x, (topk_weights, topk_ids) = activations(9, 64, "float32"), routed(9, 4, 2)
    plain = packed(ops, 4, 64, 64, "float32")
    reference = PackedExperts(
        tuple(
            ReferenceOps().pack_linear(torch.randn(128, 64), "float32", bias=one.bias)
            for one in plain.gate_up
        ),
        plain.down,
    )
    mixed = PackedExperts(
        packed(ops, 4, 64, 64, "int8", bias=False).gate_up[:1] + plain.gate_up[1:], plain.down
    )
    biased = PackedExperts(
        tuple(replace(one, bias=None) for one in plain.gate_up[:1]) + plain.gate_up[1:], plain.down
    )
    for experts in (reference, mixed, biased):
        got = ops.experts(x, experts, topk_weights, topk_ids, "silu")
        assert torch.equal(got, one_by_one(ops, x, experts, topk_weights, topk_ids, "silu"))
    nobody = LoRAInputs(torch.full((9,), -1), {})
    with_adapters = ops.experts(x, plain, topk_weights, topk_ids, "silu", lora=nobody)
    assert torch.equal(with_adapters, ops.experts(x, plain, topk_weights, topk_ids, "silu"))


def test_a_table_is_kept_as_long_as_its_experts(ops: CpuOps) -> None:
    x, (topk_weights, topk_ids) = activations(2, 64, "float32"), routed(2, 4, 2)
    gc.collect()
    before = len(ops._tables)
    for _ in range(3):
        experts = packed(ops, 4, 64, 64, "float32")
        for _ in range(2):
            ops.experts(x, experts, topk_weights, topk_ids, "silu")
        assert len(ops._tables) == before + 1
        del experts
        gc.collect()
        assert len(ops._tables) == before
