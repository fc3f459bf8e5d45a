"""Experts and their router: the reference against numpy, a row at a time; back ends against the reference."""

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
from penstock.kernels.reference.ops import ROWS_OF_EXPERTS

HIDDEN, INNER, EXPERTS = 24, 20, 6
CLAMPED = ClampedSwiGLU(1.702, 1.5)
ROUTINGS: tuple[Routing, ...] = ("all", "all_normed", "chosen")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-5}


@pytest.fixture(params=back_end_params(all_back_ends()))
def ops(request: pytest.FixtureRequest) -> Ops:
    return all_back_ends()[request.param]


@pytest.fixture(params=back_end_params(all_back_ends()))
def deterministic(request: pytest.FixtureRequest) -> Ops:
    return all_back_ends(deterministic=True)[request.param]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def weights(*, bias: bool) -> list[tuple[Tensor, Tensor | None, Tensor, Tensor | None]]:
    """Return for each expert: gate and up weights, their bias, down weights, their bias."""
    return [
        (
            torch.randn(2 * INNER, HIDDEN) / 4,
            torch.randn(2 * INNER) if bias else None,
            torch.randn(HIDDEN, INNER) / 4,
            torch.randn(HIDDEN) if bias else None,
        )
        for _ in range(EXPERTS)
    ]


def packed(
    ops: Ops, given: list[tuple[Tensor, Tensor | None, Tensor, Tensor | None]], dtype: torch.dtype
) -> PackedExperts:
    encoding = str(dtype).removeprefix("torch.")
    return PackedExperts(
        tuple(
            ops.pack_linear(
                one[0],
                encoding,
                bias=one[1],
                slices=[LinearSlice(f"{i}.gate", 0, INNER), LinearSlice(f"{i}.up", INNER, 2 * INNER)],
            )
            for i, one in enumerate(given)
        ),
        tuple(
            ops.pack_linear(one[2], encoding, bias=one[3], slices=[LinearSlice(f"{i}.down", 0, HIDDEN)])
            for i, one in enumerate(given)
        ),
    )


def routed(rows: int, top: int) -> tuple[Tensor, Tensor]:
    """Return topk_weights and topk_ids of random rows."""
    return ReferenceOps().route(torch.randn(rows, EXPERTS) * 2, top, "all")


def naive_gate(x: np.ndarray, gating: Gating) -> np.ndarray:
    gate, up = x[:INNER], x[INNER:]
    if isinstance(gating, ClampedSwiGLU):
        gate = np.minimum(gate, gating.limit)
        up = np.maximum(np.minimum(up, gating.limit), -gating.limit) + 1
        return gate / (1 + np.exp(-gating.alpha * gate)) * up
    return gate / (1 + np.exp(-gate)) * up if gating == "silu" else np.maximum(gate, 0) * up


# ---- the definition ----


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routes_are_what_numpy_chooses(routing: Routing) -> None:
    logits = torch.randn(9, EXPERTS) * 3
    topk_weights, topk_ids = ReferenceOps().route(logits, 3, routing)
    for row in range(9):
        scores = logits[row].double().numpy()
        order = np.argsort(-scores)[:3]
        assert topk_ids[row].tolist() == order.tolist()
        powers = np.exp(scores - scores.max())
        among = powers.sum() if routing == "all" else powers[order].sum()
        np.testing.assert_allclose(topk_weights[row].numpy(), powers[order] / among, rtol=1e-5)
    assert topk_weights.dtype == torch.float32


@pytest.mark.parametrize("gating", ["silu", "relu", CLAMPED], ids=["silu", "relu", "clamped"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "top"), [(1, 2), (7, 1), (33, 4), (5, EXPERTS)])
def test_experts_are_the_sum_of_each_rows_own(rows: int, top: int, bias: bool, gating: Gating) -> None:
    given, x = weights(bias=bias), torch.randn(rows, HIDDEN)
    topk_weights, topk_ids = routed(rows, top)
    got = ReferenceOps().experts(
        x, packed(ReferenceOps(), given, torch.float32), topk_weights, topk_ids, gating
    )
    for row in range(rows):
        expected = np.zeros(HIDDEN)
        for share, expert in zip(topk_weights[row].tolist(), topk_ids[row].tolist(), strict=True):
            gate_up, gate_up_bias, down, down_bias = (
                0.0 if tensor is None else tensor.double().numpy() for tensor in given[expert]
            )
            inner = naive_gate(gate_up @ x[row].double().numpy() + gate_up_bias, gating)
            expected += share * (down @ inner + down_bias)
        np.testing.assert_allclose(got[row].numpy(), expected, atol=1e-5)


@given(st.lists(st.permutations(range(5)), max_size=30), st.integers(1, 5), st.integers(1, 9))
def test_assignments_are_grouped_by_expert(rows: list[list[int]], top: int, at_most: int) -> None:
    topk_ids = torch.tensor([row[:top] for row in rows], dtype=torch.int64).view(len(rows), top)
    seen: list[tuple[int, int]] = []
    for places, sizes in grouped_by_expert(topk_ids, 5, at_most):
        assert 1 <= len(places) == sum(sizes.values()) <= at_most
        named = [expert for expert, size in sizes.items() for _ in range(size)]
        assert topk_ids.flatten()[places].tolist() == named
        seen += zip(named, places.tolist(), strict=True)
    assert seen == sorted(seen)
    assert sorted(place for _, place in seen) == list(range(topk_ids.numel()))


# ---- every back end ----


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gating", ["silu", "gelu_tanh", CLAMPED], ids=["silu", "gelu_tanh", "clamped"])
@pytest.mark.parametrize(("rows", "top"), [(1, 2), (1, EXPERTS), (3, 3), (40, 2), (300, 1)])
def test_back_ends_agree(ops: Ops, dtype: torch.dtype, rows: int, top: int, gating: Gating) -> None:
    x, experts = torch.randn(rows, 2 * HIDDEN).to(dtype)[:, :HIDDEN], packed(ops, weights(bias=True), dtype)
    topk_weights, topk_ids = routed(rows, top)
    expected = ReferenceOps().experts(x, experts, topk_weights, topk_ids, gating)
    got = ops.experts(x, experts, topk_weights, topk_ids, gating)
    assert got.dtype == dtype
    assert off(got, expected) <= 1


FAULTS: dict[str, Callable[[PackedExperts, Tensor, Tensor], tuple[PackedExperts, Tensor, Tensor]]] = {
    "two experts swapped": lambda p, s, c: (
        PackedExperts((p.gate_up[1], p.gate_up[0], *p.gate_up[2:]), (p.down[1], p.down[0], *p.down[2:])),
        s,
        c,
    ),
    "weights of other experts": lambda p, s, c: (p, s.roll(1, 1), c),
    "weights of other rows": lambda p, s, c: (p, s.roll(1, 0), c),
    "experts of other rows": lambda p, s, c: (p, s, c.roll(1, 0)),
    "the last expert left out": lambda p, s, c: (p, s[:, :-1], c[:, :-1]),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_detects_a_fault(ops: Ops, dtype: torch.dtype, fault: str) -> None:
    x, experts = torch.randn(40, HIDDEN).to(dtype), packed(ops, weights(bias=True), dtype)
    topk_weights, topk_ids = routed(40, 3)
    expected = ReferenceOps().experts(x, experts, topk_weights, topk_ids, "silu")
    broken, other_weights, other_ids = FAULTS[fault](experts, topk_weights, topk_ids)
    assert off(ops.experts(x, broken, other_weights, other_ids, "silu"), expected) > 4


def off(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference in multiples of the tolerance."""
    return float((got.float() - expected.float()).abs().max()) / (
        TOLERANCE[expected.dtype] * max(1.0, float(expected.abs().max()))
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routes_agree(ops: Ops, dtype: torch.dtype, routing: Routing) -> None:
    logits = torch.randn(50, 40).to(dtype)
    expected_weights, expected = ReferenceOps().route(logits, 4, routing)
    topk_weights, topk_ids = ops.route(logits, 4, routing)
    assert torch.equal(topk_ids, expected)
    torch.testing.assert_close(topk_weights, expected_weights)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_clamped_swish_far_out(ops: Ops, dtype: torch.dtype) -> None:
    gates = torch.tensor([-1e30, -90.0, -1.5, 0.0, 1.4, 1.6, 90.0, 1e30]).to(dtype)
    x = torch.cat([gates, gates.flip(0)])[None]
    got = ops.clamped_swiglu(x, CLAMPED)
    torch.testing.assert_close(got, ReferenceOps().clamped_swiglu(x, CLAMPED))
    assert got.isfinite().all()
    assert got[0, -2:].tolist() == pytest.approx([got[0, -1].item()] * 2), "both at their limits"


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bits_of_a_row_do_not_depend_on_other_rows(deterministic: Ops, dtype: torch.dtype) -> None:
    x, experts = torch.randn(90, HIDDEN).to(dtype), packed(deterministic, weights(bias=True), dtype)
    topk_weights, topk_ids = deterministic.route(torch.randn(90, EXPERTS), 3, "all_normed")
    whole = deterministic.experts(x, experts, topk_weights, topk_ids, CLAMPED)
    for some in (torch.tensor([7]), torch.arange(5, 18), torch.randperm(90)):
        assert torch.equal(
            deterministic.experts(x[some], experts, topk_weights[some], topk_ids[some], CLAMPED), whole[some]
        )


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("experts", [6, 30, 128])
def test_the_route_of_a_row_does_not_depend_on_other_rows(
    deterministic: Ops, routing: Routing, experts: int
) -> None:
    logits = torch.randn(700, experts).bfloat16()  # with ties
    topk_weights, topk_ids = deterministic.route(logits, 4, routing)
    for some in (torch.tensor([7]), torch.arange(5, 18), torch.randperm(700)):
        own_weights, own = deterministic.route(logits[some], 4, routing)
        assert torch.equal(own, topk_ids[some])
        assert torch.equal(own_weights, topk_weights[some])


def test_an_expert_that_all_rows_use(deterministic: Ops) -> None:
    """The rows exceed those that an expert computes at once."""
    rows = 2 * ROWS_OF_EXPERTS + 5
    x, experts = torch.randn(rows, HIDDEN), packed(deterministic, weights(bias=False), torch.float32)
    topk_weights, topk_ids = torch.ones(rows, 1), torch.full((rows, 1), 4)
    whole = deterministic.experts(x, experts, topk_weights, topk_ids, "silu")
    parts = [
        deterministic.experts(x[a:b], experts, topk_weights[a:b], topk_ids[a:b], "silu")
        for a, b in pairwise([0, 1000, 1030, rows])
    ]
    assert torch.equal(torch.cat(parts), whole)


# ---- adapters and recording ----


def adapters(rows: Tensor, names: list[str]) -> LoRAInputs:
    sizes = {"gate": (HIDDEN, INNER), "up": (HIDDEN, INNER), "down": (INNER, HIDDEN)}
    matrices = {}
    for name in names:
        inputs, outputs = sizes[name.partition(".")[2]]
        matrices[name] = (torch.randn(2, 3, inputs) / 4, (torch.randn(2, 3, outputs) / 2).transpose(1, 2))
    return LoRAInputs(rows, matrices)


def test_adapters_on_some_experts_are_merged_weights(deterministic: Ops) -> None:
    given, x = weights(bias=True), torch.randn(30, HIDDEN)
    topk_weights, topk_ids = routed(30, 3)
    rows = torch.randint(-1, 2, (30,))
    lora = adapters(rows, ["1.up", "4.gate", "4.down"])
    got = deterministic.experts(
        x, packed(deterministic, given, torch.float32), topk_weights, topk_ids, "silu", lora=lora
    )
    for adapter in (-1, 0, 1):
        merged = [tuple(None if one is None else one.clone() for one in expert) for expert in given]
        if adapter >= 0:
            for name, (down, up) in lora.matrices.items():
                expert, _, part = name.partition(".")
                matrix = merged[int(expert)][2 if part == "down" else 0]
                assert matrix is not None
                target = {"gate": matrix[:INNER], "up": matrix[INNER:], "down": matrix}[part]
                target += up[adapter] @ down[adapter]
        expected = deterministic.experts(
            x, packed(deterministic, merged, torch.float32), topk_weights, topk_ids, "silu"
        )  # type: ignore[arg-type]
        torch.testing.assert_close(got[rows == adapter], expected[rows == adapter], atol=1e-5, rtol=1e-4)
    plain = deterministic.experts(
        x, packed(deterministic, given, torch.float32), topk_weights, topk_ids, "silu"
    )
    assert torch.equal(got[rows < 0], plain[rows < 0]), "to the bit"
    assert not torch.allclose(got[rows >= 0], plain[rows >= 0], atol=1e-3)


def test_a_recorded_layer_routes_anew() -> None:
    experts, x, router = (
        packed(ReferenceOps(), weights(bias=True), torch.float32),
        torch.randn(4, HIDDEN),
        torch.randn(6, HIDDEN),
    )
    gate = pack_linear(router, "float32")

    def layer(ops: Ops, x: Tensor) -> Tensor:
        topk_weights, topk_ids = ops.route(ops.linear(x, gate), 2, "chosen")
        return ops.experts(x, experts, topk_weights, topk_ids, CLAMPED)

    plan = record(ReferenceOps(), {"x": x}, lambda ops: [layer(ops, x)])
    other = torch.randn(4, HIDDEN)
    (replayed,) = plan.replay(ReferenceOps(), {"x": other})
    assert torch.equal(replayed, layer(ReferenceOps(), other))
    lora = adapters(torch.zeros(4, dtype=torch.int64), ["0.up"])
    topk_weights, topk_ids = routed(4, 2)
    inputs = {"x": x, "topk_weights": topk_weights, "topk_ids": topk_ids}
    with pytest.raises(UnrecordableStepError, match="adapters"):
        record(
            ReferenceOps(),
            inputs,
            lambda ops: [ops.experts(x, experts, topk_weights, topk_ids, CLAMPED, lora=lora)],
        )
