"""The experts kernel is bit-equal to computing one expert at a time with the kernels of linear layers."""

from __future__ import annotations

import gc
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


def pack_experts(
    ops: CpuOps,
    num_experts: int,
    hidden_size: int,
    inner_size: int,
    encoding: str,
    down_encoding: str = "",
    *,
    has_bias: bool = True,
) -> PackedExperts:
    def pack_linears(out_features: int, in_features: int, encoding: str) -> tuple[PackedLinear, ...]:
        weights = torch.randn(num_experts, out_features, in_features) / in_features**0.5
        biases = torch.randn(num_experts, out_features)
        return tuple(
            ops.pack_linear(weight, encoding, bias=weight_bias if has_bias else None)
            for weight, weight_bias in zip(weights, biases, strict=True)
        )

    return PackedExperts(
        pack_linears(2 * inner_size, hidden_size, encoding),
        pack_linears(hidden_size, inner_size, down_encoding or encoding),
    )


def random_routes(num_rows: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    return ReferenceOps().route(torch.randn(num_rows, num_experts) * 2, top_k, "all")


def run_experts_separately(
    ops: CpuOps, x: Tensor, experts: PackedExperts, topk_weights: Tensor, topk_ids: Tensor, gating: Gating
) -> Tensor:
    """Compute the experts one at a time with the kernels of linear layers and gates."""
    return ReferenceOps.experts(ops, x, experts, topk_weights, topk_ids, gating)


def random_activations(num_rows: int, width: int, encoding: str) -> Tensor:
    """Return activations ``[num_rows, width]`` with gaps between the rows in memory."""
    return torch.randn(num_rows, width + 24).to(encoding_named(encoding).compute_dtype.to_torch())[:, :width]


@pytest.mark.matrix
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int5", "int4", "uint4", "uint8", "fp8"])
def test_results_for_any_number_of_rows_are_bit_equal_to_separate_experts(
    ops: CpuOps, encoding: str, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = pack_experts(ops, 7, 72, 100, encoding, has_bias=has_bias)
    cases = []
    for num_rows in (*range(1, 41), 0, 300, 800):
        x, gating = random_activations(num_rows, 72, encoding), GATINGS[num_rows % 5]
        topk_weights, topk_ids = random_routes(num_rows, 7, 1 + num_rows % 7)
        cases.append(
            (
                x,
                experts,
                topk_weights,
                topk_ids,
                gating,
                run_experts_separately(ops, x, experts, topk_weights, topk_ids, gating),
            )
        )
    monkeypatch.delattr(ReferenceOps, "experts")  # the C++ kernels must not call the reference
    for *arguments, expected in cases:
        actual = ops.experts(*arguments)
        assert torch.equal(actual, expected)
        assert actual.dtype == expected.dtype


@pytest.mark.matrix
@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int5", "int4"])
@pytest.mark.parametrize("gating", GATINGS, ids=[*GATINGS[:-1], "clamped"])  # type: ignore[list-item]
def test_every_gate_is_bit_equal_to_separate_experts(ops: CpuOps, encoding: str, gating: Gating) -> None:
    experts, x = pack_experts(ops, 3, 64, 64, encoding), random_activations(5, 64, encoding)
    topk_weights, topk_ids = random_routes(5, 3, 2)
    actual = ops.experts(x, experts, topk_weights, topk_ids, gating)
    assert torch.equal(actual, run_experts_separately(ops, x, experts, topk_weights, topk_ids, gating))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("encoding", "down_encoding"), [("int8", "int8"), ("int4", "int8"), ("int8", "int4")]
)
def test_layers_in_different_encodings_are_bit_equal_to_separate_experts(
    ops: CpuOps, encoding: str, down_encoding: str, dtype: torch.dtype
) -> None:
    """The activations are float32 or bfloat16."""
    experts = pack_experts(ops, 4, 130, 40, encoding, down_encoding, has_bias=False)
    x = torch.randn(9, 130).to(dtype)
    topk_weights, topk_ids = random_routes(9, 4, 2)
    actual = ops.experts(x, experts, topk_weights, topk_ids, "silu")
    assert torch.equal(actual, run_experts_separately(ops, x, experts, topk_weights, topk_ids, "silu"))


@pytest.mark.matrix(strength=1, times=2)
@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int5", "int4"])
@pytest.mark.usefixtures("_restore_num_threads")
def test_wide_experts_are_bit_equal_on_any_number_of_threads(ops: CpuOps, encoding: str) -> None:
    """The layers have more panels than a thread computes at once, and more inputs than a block has."""
    experts = pack_experts(ops, 3, 1100, 700, encoding)
    for num_rows in (1, 2, 30):
        x, (topk_weights, topk_ids) = (
            random_activations(num_rows, 1100, encoding),
            random_routes(num_rows, 3, 2),
        )
        expected = run_experts_separately(ops, x, experts, topk_weights, topk_ids, "silu")
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            assert torch.equal(ops.experts(x, experts, topk_weights, topk_ids, "silu"), expected)


@pytest.mark.parametrize("encoding", ["float32", "int4"])
@pytest.mark.usefixtures("_restore_num_threads")
def test_several_rounds_of_row_expert_pairs_are_bit_equal_to_separate_experts(
    ops: CpuOps, encoding: str
) -> None:
    num_rows, experts = 3100, pack_experts(ops, 6, 128, 256, encoding)
    x, (topk_weights, topk_ids) = random_activations(num_rows, 128, encoding), random_routes(num_rows, 6, 4)
    # The ids are unsorted, and every row uses expert 5.
    topk_ids[:, 0], topk_ids[:1000, 1:] = (
        5,
        torch.tensor([0, 1, 3]),
    )
    topk_ids[1000:, 1:] = torch.tensor([3, 1, 4])
    expected = run_experts_separately(ops, x, experts, topk_weights, topk_ids, "silu")
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(ops.experts(x, experts, topk_weights, topk_ids, "silu"), expected)


def test_a_batch_that_uses_a_single_expert_is_bit_equal_to_separate_experts(ops: CpuOps) -> None:
    experts = pack_experts(ops, 128, 64, 32, "bfloat16")
    for num_rows in (1, 6, 7, 240, 241, 500):
        x, topk_ids = random_activations(num_rows, 64, "bfloat16"), torch.full((num_rows, 1), 77)
        topk_weights = torch.rand(num_rows, 1)
        actual = ops.experts(x, experts, topk_weights, topk_ids, "silu")
        assert torch.equal(actual, run_experts_separately(ops, x, experts, topk_weights, topk_ids, "silu"))


def test_strided_topk_weights_and_topk_ids_are_read(ops: CpuOps) -> None:
    experts, x = pack_experts(ops, 6, 64, 64, "float32"), random_activations(20, 64, "float32")
    topk_weights, topk_ids = (tensor[:, 1:3] for tensor in random_routes(20, 6, 4))
    actual = ops.experts(x, experts, topk_weights, topk_ids, "silu")
    assert torch.equal(
        actual, run_experts_separately(ops, x, experts, topk_weights.clone(), topk_ids.clone(), "silu")
    )


@pytest.mark.parametrize("invalid_id", [-1, 6, 1 << 40])
@pytest.mark.parametrize("num_rows", [2, 60])
@pytest.mark.parametrize(
    ("encoding", "dtype"), [("float32", "float32"), ("int8", "bfloat16"), ("int8", "float32")]
)
def test_an_invalid_expert_id_is_refused(
    ops: CpuOps, invalid_id: int, num_rows: int, encoding: str, dtype: str
) -> None:
    """The biases of int8 experts are bfloat16, so the reference computes them with float32 activations."""
    experts, x = pack_experts(ops, 6, 64, 64, encoding), random_activations(num_rows, 64, dtype)
    topk_weights, topk_ids = random_routes(num_rows, 6, 3)
    topk_ids[1, 2] = invalid_id
    with pytest.raises(IndexError, match=f"expert id {invalid_id} is not in 0..5"):
        ops.experts(x, experts, topk_weights, topk_ids, "silu")


def test_experts_without_kernel_support_equal_separate_experts(ops: CpuOps) -> None:
    x, (topk_weights, topk_ids) = random_activations(9, 64, "float32"), random_routes(9, 4, 2)
    plain_experts = pack_experts(ops, 4, 64, 64, "float32")
    experts_in_rows = PackedExperts(
        tuple(
            ReferenceOps().pack_linear(torch.randn(128, 64), "float32", bias=linear.bias)
            for linear in plain_experts.gate_up
        ),
        plain_experts.down,
    )
    mixed_experts = PackedExperts(
        pack_experts(ops, 4, 64, 64, "int8", has_bias=False).gate_up[:1] + plain_experts.gate_up[1:],
        plain_experts.down,
    )
    biased_experts = PackedExperts(
        tuple(replace(linear, bias=None) for linear in plain_experts.gate_up[:1]) + plain_experts.gate_up[1:],
        plain_experts.down,
    )
    for experts in (experts_in_rows, mixed_experts, biased_experts):
        actual = ops.experts(x, experts, topk_weights, topk_ids, "silu")
        assert torch.equal(actual, run_experts_separately(ops, x, experts, topk_weights, topk_ids, "silu"))
    no_adapters = LoRAInputs(torch.full((9,), -1), {})
    without_matrices = ops.experts(x, plain_experts, topk_weights, topk_ids, "silu", lora=no_adapters)
    assert torch.equal(without_matrices, ops.experts(x, plain_experts, topk_weights, topk_ids, "silu"))


def test_a_table_is_freed_with_its_experts(ops: CpuOps) -> None:
    x, (topk_weights, topk_ids) = random_activations(2, 64, "float32"), random_routes(2, 4, 2)
    gc.collect()
    num_tables_before = len(ops._tables)
    for _ in range(3):
        experts = pack_experts(ops, 4, 64, 64, "float32")
        for _ in range(2):
            ops.experts(x, experts, topk_weights, topk_ids, "silu")
        assert len(ops._tables) == num_tables_before + 1
        del experts
        gc.collect()
        assert len(ops._tables) == num_tables_before
