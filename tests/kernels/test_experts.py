"""Experts and routers: the reference agrees with numpy, and every back end agrees with the reference."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.back_ends import all_back_ends, back_end_params
from torch import Tensor

from penstock.kernels import (
    ClampedSwiGLU,
    Gating,
    LinearSlice,
    LoRAInputs,
    Ops,
    PackedExperts,
    Routing,
    pack_linear,
)
from penstock.kernels.experts import grouped_by_expert
from penstock.kernels.operations import UnrecordableStepError
from penstock.kernels.recording import record
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.reference.ops import MAX_EXPERT_PAIRS

HIDDEN_SIZE, INNER_SIZE, NUM_EXPERTS = 24, 20, 6
CLAMPED = ClampedSwiGLU(1.702, 1.5)
ROUTINGS: tuple[Routing, ...] = ("all", "all_normed", "chosen")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-5}


@pytest.fixture(params=back_end_params(all_back_ends()))
def ops(request: pytest.FixtureRequest) -> Ops:
    return all_back_ends()[request.param]


@pytest.fixture(params=back_end_params(all_back_ends()))
def deterministic_ops(request: pytest.FixtureRequest) -> Ops:
    return all_back_ends(deterministic=True)[request.param]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random_weights(*, has_bias: bool) -> list[tuple[Tensor, Tensor | None, Tensor, Tensor | None]]:
    """Return for each expert: gate and up weights, their bias, down weights, their bias."""
    return [
        (
            torch.randn(2 * INNER_SIZE, HIDDEN_SIZE) / 4,
            torch.randn(2 * INNER_SIZE) if has_bias else None,
            torch.randn(HIDDEN_SIZE, INNER_SIZE) / 4,
            torch.randn(HIDDEN_SIZE) if has_bias else None,
        )
        for _ in range(NUM_EXPERTS)
    ]


def pack_experts(
    ops: Ops,
    tensors_of_experts: list[tuple[Tensor, Tensor | None, Tensor, Tensor | None]],
    dtype: torch.dtype,
) -> PackedExperts:
    encoding = str(dtype).removeprefix("torch.")
    return PackedExperts(
        tuple(
            ops.pack_linear(
                expert_tensors[0],
                encoding,
                bias=expert_tensors[1],
                slices=[
                    LinearSlice(f"{i}.gate", 0, INNER_SIZE),
                    LinearSlice(f"{i}.up", INNER_SIZE, 2 * INNER_SIZE),
                ],
            )
            for i, expert_tensors in enumerate(tensors_of_experts)
        ),
        tuple(
            ops.pack_linear(
                expert_tensors[2],
                encoding,
                bias=expert_tensors[3],
                slices=[LinearSlice(f"{i}.down", 0, HIDDEN_SIZE)],
            )
            for i, expert_tensors in enumerate(tensors_of_experts)
        ),
    )


def random_routes(num_rows: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Return topk_weights and topk_ids of random logits."""
    return ReferenceOps().route(torch.randn(num_rows, NUM_EXPERTS) * 2, top_k, "all")


def numpy_gate(x: np.ndarray, gating: Gating) -> np.ndarray:
    gate, up = x[:INNER_SIZE], x[INNER_SIZE:]
    if isinstance(gating, ClampedSwiGLU):
        gate = np.minimum(gate, gating.limit)
        up = np.maximum(np.minimum(up, gating.limit), -gating.limit) + 1
        return gate / (1 + np.exp(-gating.alpha * gate)) * up
    return gate / (1 + np.exp(-gate)) * up if gating == "silu" else np.maximum(gate, 0) * up


# ---- the reference against numpy ----


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routes_equal_numpy(routing: Routing) -> None:
    logits = torch.randn(9, NUM_EXPERTS) * 3
    topk_weights, topk_ids = ReferenceOps().route(logits, 3, routing)
    for row in range(9):
        scores = logits[row].double().numpy()
        order = np.argsort(-scores)[:3]
        assert topk_ids[row].tolist() == order.tolist()
        powers = np.exp(scores - scores.max())
        total = powers.sum() if routing == "all" else powers[order].sum()
        np.testing.assert_allclose(topk_weights[row].numpy(), powers[order] / total, rtol=1e-5)
    assert topk_weights.dtype == torch.float32


@pytest.mark.parametrize("gating", ["silu", "relu", CLAMPED], ids=["silu", "relu", "clamped"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "top_k"), [(1, 2), (7, 1), (33, 4), (5, NUM_EXPERTS)])
def test_experts_equal_the_weighted_sum_computed_by_numpy(
    num_rows: int, top_k: int, has_bias: bool, gating: Gating
) -> None:
    tensors_of_experts, x = random_weights(has_bias=has_bias), torch.randn(num_rows, HIDDEN_SIZE)
    topk_weights, topk_ids = random_routes(num_rows, top_k)
    actual = ReferenceOps().experts(
        x, pack_experts(ReferenceOps(), tensors_of_experts, torch.float32), topk_weights, topk_ids, gating
    )
    for row in range(num_rows):
        expected = np.zeros(HIDDEN_SIZE)
        for topk_weight, expert in zip(topk_weights[row].tolist(), topk_ids[row].tolist(), strict=True):
            gate_up, gate_up_bias, down, down_bias = (
                0.0 if tensor is None else tensor.double().numpy() for tensor in tensors_of_experts[expert]
            )
            hidden = numpy_gate(gate_up @ x[row].double().numpy() + gate_up_bias, gating)
            expected += topk_weight * (down @ hidden + down_bias)
        np.testing.assert_allclose(actual[row].numpy(), expected, atol=1e-5)


@given(st.lists(st.permutations(range(5)), max_size=30), st.integers(1, 5), st.integers(1, 9))
def test_row_expert_pairs_are_grouped_by_expert(rows: list[list[int]], top_k: int, max_pairs: int) -> None:
    topk_ids = torch.tensor([row[:top_k] for row in rows], dtype=torch.int64).view(len(rows), top_k)
    visited_pairs: list[tuple[int, int]] = []
    for pairs, pair_counts in grouped_by_expert(topk_ids, 5, max_pairs):
        assert 1 <= len(pairs) == sum(pair_counts.values()) <= max_pairs
        used_experts = [expert for expert, size in pair_counts.items() for _ in range(size)]
        assert topk_ids.flatten()[pairs].tolist() == used_experts
        visited_pairs += zip(used_experts, pairs.tolist(), strict=True)
    assert visited_pairs == sorted(visited_pairs)
    assert sorted(pair for _, pair in visited_pairs) == list(range(topk_ids.numel()))


# ---- every back end ----


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gating", ["silu", "gelu_tanh", CLAMPED], ids=["silu", "gelu_tanh", "clamped"])
@pytest.mark.parametrize(("num_rows", "top_k"), [(1, 2), (1, NUM_EXPERTS), (3, 3), (40, 2), (300, 1)])
def test_experts_agree_with_the_reference(
    ops: Ops, dtype: torch.dtype, num_rows: int, top_k: int, gating: Gating
) -> None:
    x, experts = (
        torch.randn(num_rows, 2 * HIDDEN_SIZE).to(dtype)[:, :HIDDEN_SIZE],
        pack_experts(ops, random_weights(has_bias=True), dtype),
    )
    topk_weights, topk_ids = random_routes(num_rows, top_k)
    expected = ReferenceOps().experts(x, experts, topk_weights, topk_ids, gating)
    actual = ops.experts(x, experts, topk_weights, topk_ids, gating)
    assert actual.dtype == dtype
    assert relative_error(actual, expected) <= 1


MUTATIONS: dict[str, Callable[[PackedExperts, Tensor, Tensor], tuple[PackedExperts, Tensor, Tensor]]] = {
    "two experts swapped": lambda experts, weights, ids: (
        PackedExperts(
            (experts.gate_up[1], experts.gate_up[0], *experts.gate_up[2:]),
            (experts.down[1], experts.down[0], *experts.down[2:]),
        ),
        weights,
        ids,
    ),
    "weights of other experts": lambda experts, weights, ids: (experts, weights.roll(1, 1), ids),
    "weights of other rows": lambda experts, weights, ids: (experts, weights.roll(1, 0), ids),
    "experts of other rows": lambda experts, weights, ids: (experts, weights, ids.roll(1, 0)),
    "last selected expert dropped": lambda experts, weights, ids: (experts, weights[:, :-1], ids[:, :-1]),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_detects_a_mutation(ops: Ops, dtype: torch.dtype, mutation: str) -> None:
    x, experts = (
        torch.randn(40, HIDDEN_SIZE).to(dtype),
        pack_experts(ops, random_weights(has_bias=True), dtype),
    )
    topk_weights, topk_ids = random_routes(40, 3)
    expected = ReferenceOps().experts(x, experts, topk_weights, topk_ids, "silu")
    mutated_experts, other_weights, other_ids = MUTATIONS[mutation](experts, topk_weights, topk_ids)
    assert relative_error(ops.experts(x, mutated_experts, other_weights, other_ids, "silu"), expected) > 4


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference, as a multiple of the tolerance."""
    return float((actual.float() - expected.float()).abs().max()) / (
        TOLERANCE[expected.dtype] * max(1.0, float(expected.abs().max()))
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routes_agree_with_the_reference(ops: Ops, dtype: torch.dtype, routing: Routing) -> None:
    logits = torch.randn(50, 40).to(dtype)
    expected_weights, expected_ids = ReferenceOps().route(logits, 4, routing)
    topk_weights, topk_ids = ops.route(logits, 4, routing)
    assert torch.equal(topk_ids, expected_ids)
    torch.testing.assert_close(topk_weights, expected_weights)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_clamped_swiglu_of_extreme_values_agrees_with_the_reference(ops: Ops, dtype: torch.dtype) -> None:
    gates = torch.tensor([-1e30, -90.0, -1.5, 0.0, 1.4, 1.6, 90.0, 1e30]).to(dtype)
    x = torch.cat([gates, gates.flip(0)])[None]
    actual = ops.clamped_swiglu(x, CLAMPED)
    torch.testing.assert_close(actual, ReferenceOps().clamped_swiglu(x, CLAMPED))
    assert actual.isfinite().all()
    assert actual[0, -2:].tolist() == pytest.approx([actual[0, -1].item()] * 2), (
        "both the gate and the up value must be clamped"
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_experts_of_a_row_are_bit_equal_in_any_batch(deterministic_ops: Ops, dtype: torch.dtype) -> None:
    x, experts = (
        torch.randn(90, HIDDEN_SIZE).to(dtype),
        pack_experts(deterministic_ops, random_weights(has_bias=True), dtype),
    )
    topk_weights, topk_ids = deterministic_ops.route(torch.randn(90, NUM_EXPERTS), 3, "all_normed")
    full_result = deterministic_ops.experts(x, experts, topk_weights, topk_ids, CLAMPED)
    for row_indices in (torch.tensor([7]), torch.arange(5, 18), torch.randperm(90)):
        assert torch.equal(
            deterministic_ops.experts(
                x[row_indices], experts, topk_weights[row_indices], topk_ids[row_indices], CLAMPED
            ),
            full_result[row_indices],
        )


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_experts", [6, 30, 128])
def test_the_route_of_a_row_is_equal_in_any_batch(
    deterministic_ops: Ops, routing: Routing, num_experts: int
) -> None:
    logits = torch.randn(700, num_experts).bfloat16()  # some logits are equal
    topk_weights, topk_ids = deterministic_ops.route(logits, 4, routing)
    for row_indices in (torch.tensor([7]), torch.arange(5, 18), torch.randperm(700)):
        selected_weights, selected_ids = deterministic_ops.route(logits[row_indices], 4, routing)
        assert torch.equal(selected_ids, topk_ids[row_indices])
        assert torch.equal(selected_weights, topk_weights[row_indices])


def test_a_batch_with_many_row_expert_pairs_equals_its_parts_bit_for_bit(deterministic_ops: Ops) -> None:
    """The batch has more (row, expert) pairs than `ReferenceOps.experts` computes at once."""
    rows = 2 * MAX_EXPERT_PAIRS + 5
    x, experts = (
        torch.randn(rows, HIDDEN_SIZE),
        pack_experts(deterministic_ops, random_weights(has_bias=False), torch.float32),
    )
    topk_weights, topk_ids = torch.ones(rows, 1), torch.full((rows, 1), 4)
    full_result = deterministic_ops.experts(x, experts, topk_weights, topk_ids, "silu")
    partial_results = [
        deterministic_ops.experts(
            x[start:stop], experts, topk_weights[start:stop], topk_ids[start:stop], "silu"
        )
        for start, stop in pairwise([0, 1000, 1030, rows])
    ]
    assert torch.equal(torch.cat(partial_results), full_result)


# ---- adapters and recording ----


def random_adapters(rows: Tensor, names: list[str]) -> LoRAInputs:
    features = {
        "gate": (HIDDEN_SIZE, INNER_SIZE),
        "up": (HIDDEN_SIZE, INNER_SIZE),
        "down": (INNER_SIZE, HIDDEN_SIZE),
    }
    matrices = {}
    for name in names:
        in_features, out_features = features[name.partition(".")[2]]
        matrices[name] = (
            torch.randn(2, 3, in_features) / 4,
            (torch.randn(2, 3, out_features) / 2).transpose(1, 2),
        )
    return LoRAInputs(rows, matrices)


def test_adapters_on_some_experts_equal_merged_weights(deterministic_ops: Ops) -> None:
    tensors_of_experts, x = random_weights(has_bias=True), torch.randn(30, HIDDEN_SIZE)
    topk_weights, topk_ids = random_routes(30, 3)
    rows = torch.randint(-1, 2, (30,))
    lora = random_adapters(rows, ["1.up", "4.gate", "4.down"])
    actual = deterministic_ops.experts(
        x,
        pack_experts(deterministic_ops, tensors_of_experts, torch.float32),
        topk_weights,
        topk_ids,
        "silu",
        lora=lora,
    )
    for adapter in (-1, 0, 1):
        merged_experts = [
            tuple(None if tensor is None else tensor.clone() for tensor in expert)
            for expert in tensors_of_experts
        ]
        if adapter >= 0:
            for name, (down, up) in lora.matrices.items():
                expert, _, matrix_name = name.partition(".")
                matrix = merged_experts[int(expert)][2 if matrix_name == "down" else 0]
                assert matrix is not None
                target = {"gate": matrix[:INNER_SIZE], "up": matrix[INNER_SIZE:], "down": matrix}[matrix_name]
                target += up[adapter] @ down[adapter]
        expected = deterministic_ops.experts(
            x,
            pack_experts(deterministic_ops, merged_experts, torch.float32),  # type: ignore[arg-type]
            topk_weights,
            topk_ids,
            "silu",
        )
        torch.testing.assert_close(actual[rows == adapter], expected[rows == adapter], atol=1e-5, rtol=1e-4)
    plain_result = deterministic_ops.experts(
        x, pack_experts(deterministic_ops, tensors_of_experts, torch.float32), topk_weights, topk_ids, "silu"
    )
    assert torch.equal(actual[rows < 0], plain_result[rows < 0]), "rows without an adapter must be bit-equal"
    assert not torch.allclose(actual[rows >= 0], plain_result[rows >= 0], atol=1e-3)


def test_a_replayed_layer_routes_new_inputs_and_recording_refuses_adapters() -> None:
    experts, x, router_weight = (
        pack_experts(ReferenceOps(), random_weights(has_bias=True), torch.float32),
        torch.randn(4, HIDDEN_SIZE),
        torch.randn(6, HIDDEN_SIZE),
    )
    packed_router = pack_linear(router_weight, "float32")

    def layer(ops: Ops, x: Tensor) -> Tensor:
        topk_weights, topk_ids = ops.route(ops.linear(x, packed_router), 2, "chosen")
        return ops.experts(x, experts, topk_weights, topk_ids, CLAMPED)

    plan = record(ReferenceOps(), {"x": x}, lambda ops: [layer(ops, x)])
    other_x = torch.randn(4, HIDDEN_SIZE)
    (replayed_result,) = plan.replay(ReferenceOps(), {"x": other_x})
    assert torch.equal(replayed_result, layer(ReferenceOps(), other_x))
    lora = random_adapters(torch.zeros(4, dtype=torch.int64), ["0.up"])
    topk_weights, topk_ids = random_routes(4, 2)
    inputs = {"x": x, "topk_weights": topk_weights, "topk_ids": topk_ids}
    with pytest.raises(UnrecordableStepError, match="adapters"):
        record(
            ReferenceOps(),
            inputs,
            lambda ops: [ops.experts(x, experts, topk_weights, topk_ids, CLAMPED, lora=lora)],
        )
