"""Every back end except the reference agrees with the reference. Changed inputs fail the comparison."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.back_ends import back_end_params, fast_back_ends
from torch import Tensor

from penstock.kernels import (
    XIELU,
    ClampedSwiGLU,
    LayerKV,
    LoRAInputs,
    Ops,
    PackedLinear,
    Routing,
    SamplingInputs,
    ScoreRouting,
    SparseMixer,
)
from penstock.kernels.linear import LinearSlice
from penstock.kernels.reference import ReferenceOps

REFERENCE = ReferenceOps()
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


@pytest.fixture(params=back_end_params(fast_back_ends()))
def ops(request: pytest.FixtureRequest) -> Ops:
    return fast_back_ends()[request.param]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def are_close(actual: Tensor, expected: Tensor) -> bool:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    tolerance = TOLERANCE.get(expected.dtype, 0.0)  # integers must be equal
    return torch.allclose(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


def assert_agrees(operation: Callable[[Ops], Tensor | tuple[Tensor, ...]], ops: Ops) -> None:
    """Check that an operation of a back end agrees with the operation of the reference."""
    results, expected = operation(ops), operation(REFERENCE)
    if isinstance(results, Tensor):
        results, expected = (results,), (expected,)
    for actual, reference in zip(results, expected, strict=True):
        assert are_close(actual, reference), (
            f"the largest difference is {(actual.float() - reference.float()).abs().max()}"
        )


# ---- rows ----


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 64), (3, 8), (8, 100), (33, 257), (70, 2048)])
def test_rms_norms_agree_with_the_reference(ops: Ops, dtype: torch.dtype, num_rows: int, width: int) -> None:
    x, residual = torch.randn(2, num_rows, 2 * width).to(dtype)[:, :, :width]  # the rows are strided
    for weight in (torch.randn(width), torch.randn(width).to(dtype)):
        assert_agrees(lambda ops, weight=weight: ops.rms_norm(x, weight, 1e-5), ops)
        assert_agrees(lambda ops, weight=weight: ops.add_rms_norm(x, residual, weight, 1e-5), ops)


@pytest.mark.parametrize("width", [64, 257])
def test_a_float32_norm_weight_is_applied_before_rounding(ops: Ops, width: int) -> None:
    x, residual = torch.randn(2, 33, width).bfloat16()
    weight = 1 + torch.randn(width)
    for back_end in (ops, REFERENCE):
        normalized, total = back_end.add_rms_norm(x, residual, weight, 1e-6)
        exact_result = (
            total.double() / (total.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        )
        for rows in (normalized, back_end.rms_norm(total, weight, 1e-6)):
            assert ((rows.double() - exact_result).abs() <= exact_result.abs() * 2.0**-8 * 1.001).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_agrees_with_the_reference(ops: Ops, dtype: torch.dtype) -> None:
    q, k, _ = fused_qkv(5, 4, 2, 16, dtype)
    assert_agrees(
        lambda ops: ops.rms_norm(q, torch.randn(16, generator=torch.Generator().manual_seed(1)), 1e-6), ops
    )
    assert_agrees(lambda ops: ops.rms_norm(k, torch.ones(16), 1e-6), ops)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 64), (8, 100), (33, 257)])
def test_layer_norm_agrees_with_the_reference(
    ops: Ops, dtype: torch.dtype, num_rows: int, width: int
) -> None:
    x = (3 + torch.randn(num_rows, 2 * width)).to(dtype)[:, :width]
    weight, bias = torch.randn(2, width).to(dtype)
    assert_agrees(lambda ops: ops.layer_norm(x, weight, bias, 1e-5), ops)
    x64 = x.double()
    x64 = (x64 - x64.mean(-1, keepdim=True)) / (x64.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    expected = x64 * weight.double() + bias.double()
    assert are_close(ops.layer_norm(x, weight, bias, 1e-5), expected.to(dtype))
    assert not are_close(ops.layer_norm(x, weight, -bias, 1e-5), expected.to(dtype))
    assert_agrees(lambda ops: ops.add_layer_norm(x, x.flip(0), weight, bias, 1e-5), ops)
    assert_agrees(lambda ops: ops.layer_norm_of_sum(x, x.flip(0), weight.float(), bias.float(), 1e-5), ops)


def test_layer_norm_of_sum_does_not_round_the_sum(ops: Ops) -> None:
    x, residual = torch.full((1, 64), 256.0), torch.full((1, 64), 0.5)
    residual[0, ::2] = 0.25  # bfloat16 would round 256.25 and 256.5 to 256
    weight, bias = torch.ones(64), torch.zeros(64)
    inputs = x.bfloat16(), residual.bfloat16(), weight, bias, 1e-12
    expected = torch.where(residual == 0.5, 1.0, -1.0)
    assert are_close(ops.layer_norm_of_sum(*inputs), expected.bfloat16())
    assert not are_close(ops.add_layer_norm(*inputs)[0], expected.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_of_heads_applies_a_weight_and_bias_per_head(ops: Ops, dtype: torch.dtype) -> None:
    q, k, _ = fused_qkv(5, 4, 2, 24, dtype)
    weight, bias = torch.randn(2, 4, 24).to(dtype)
    assert_agrees(lambda ops: ops.layer_norm(q, weight, bias, 1e-5), ops)
    for head in range(4):
        expected_head = REFERENCE.layer_norm(q[:, head], weight[head], bias[head], 1e-5)
        assert are_close(ops.layer_norm(q, weight, bias, 1e-5)[:, head], expected_head)
        assert not are_close(ops.layer_norm(q, weight.roll(1, 0), bias, 1e-5)[:, head], expected_head)
    assert_agrees(lambda ops: ops.layer_norm(k, weight[0], bias[0], 1e-5), ops)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 8), (3, 50), (33, 257)])
def test_elementwise_operations_agree_with_the_reference(
    ops: Ops, dtype: torch.dtype, num_rows: int, width: int
) -> None:
    x, y = (5 * torch.randn(2, num_rows, 2 * width)).to(dtype)[:, :, :width]
    assert_agrees(lambda ops: ops.add(x, y), ops)
    assert_agrees(lambda ops: ops.multiply(x, y), ops)
    assert_agrees(lambda ops: ops.scale(x, 0.22), ops)
    assert_agrees(lambda ops: ops.soft_cap(x, 3.0), ops)
    assert (ops.soft_cap(1000 * x, 3.0).abs() <= 3).all()
    assert are_close(ops.soft_cap(x, 1e6), x)
    assert torch.equal(ops.clamp(x, -2.5, 1.5), x.clamp(-2.5, 1.5))
    assert_agrees(lambda ops: ops.clamp(x, -2.5, 1.5), ops)
    assert torch.equal(ops.clamp(x, -math.inf, math.inf), x)
    for activation, function in TORCH_ACTIVATIONS.items():
        assert_agrees(lambda ops, activation=activation: ops.activation(x, activation), ops)
        assert are_close(ops.activation(x, activation), function(x.float()).to(dtype))


TORCH_ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 8), (3, 50), (33, 257)])
def test_xielu_agrees_with_its_definition(ops: Ops, dtype: torch.dtype, num_rows: int, width: int) -> None:
    x = (5 * torch.randn(num_rows, 2 * width)).to(dtype)[:, :width]
    for activation in (XIELU(0.8, 1.3, 0.5, -1e-6), XIELU(0.1, 0.7, 0.25, -0.5)):
        assert_agrees(lambda ops, activation=activation: ops.xielu(x, activation), ops)
        x64 = x.double()
        negative_part = activation.negative_factor * (x64.clamp(max=activation.eps).expm1() - x64)
        expected = activation.slope * x64 + torch.where(
            x64 > 0, activation.positive_factor * x64.square(), negative_part
        )
        assert are_close(ops.xielu(x, activation), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (64, 64), (80, 32), (128, 128)])
def test_rotary_agrees_with_the_reference(
    ops: Ops, dtype: torch.dtype, head_dim: int, rotary_dim: int
) -> None:
    q, k, _ = fused_qkv(33, 4, 2, head_dim, dtype)
    angles = torch.rand(33, rotary_dim // 2) * 6
    for is_interleaved in (False, True):
        assert_agrees(
            lambda ops, i=is_interleaved: ops.rotary(q, k, angles.cos(), angles.sin(), is_interleaved=i), ops
        )


def test_interleaved_rotary_of_reordered_dimensions_equals_half_split_rotary(ops: Ops) -> None:
    """The interleaved rotary of reordered dimensions equals the reordered result of the half-split rotary."""
    q, k, _ = fused_qkv(9, 4, 2, 40, torch.float32)
    angles = torch.rand(9, 12) * 6
    order = torch.cat([torch.arange(24).view(2, 12).T.flatten(), torch.arange(24, 40)])
    half_split = ops.rotary(q, k, angles.cos(), angles.sin())
    interleaved = ops.rotary(q[..., order], k[..., order], angles.cos(), angles.sin(), is_interleaved=True)
    for half_split_heads, interleaved_heads in zip(half_split, interleaved, strict=True):
        assert are_close(interleaved_heads, half_split_heads[..., order])
        assert not are_close(interleaved_heads, half_split_heads)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 8), (3, 50), (33, 704)])
def test_gated_activation_agrees_with_the_reference(
    ops: Ops, dtype: torch.dtype, activation: str, num_rows: int, width: int
) -> None:
    x = (4 * torch.randn(num_rows, 3 * width)).to(dtype)[:, : 2 * width]
    assert_agrees(lambda ops: ops.gated_activation(x, activation), ops)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 8), (3, 50), (33, 257)])
def test_clamped_swiglu_agrees_with_the_reference(
    ops: Ops, dtype: torch.dtype, num_rows: int, width: int
) -> None:
    x = (5 * torch.randn(num_rows, 3 * width)).to(dtype)[:, : 2 * width]
    assert_agrees(lambda ops: ops.clamped_swiglu(x, ClampedSwiGLU(1.702, 7.0)), ops)
    clamped_result = ops.clamped_swiglu(100 * x, ClampedSwiGLU(1.702, 7.0)).float()
    assert (clamped_result.abs() <= 56).all()
    assert (clamped_result > 55.9).any() or num_rows == 1


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("routing", ["all", "all_normed", "chosen"])
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "top_k"), [(1, 1, 1), (5, 8, 2), (33, 60, 7), (70, 128, 128)]
)
def test_routes_agree_with_the_reference(
    ops: Ops, dtype: torch.dtype, routing: Routing, num_rows: int, num_experts: int, top_k: int
) -> None:
    # These logits are distinct in bfloat16 as well.
    distinct_logits = torch.stack([torch.randperm(num_experts) for _ in range(num_rows)]) / 8
    logits = torch.cat([distinct_logits, torch.full((num_rows, 3), 99.0)], dim=1).to(dtype)[:, :num_experts]
    assert_agrees(lambda ops: ops.route(logits, top_k, routing), ops)
    assert_agrees(lambda ops: ops.route(100 * logits, top_k, routing)[0], ops)


SCORE_ROUTINGS = {
    "sigmoid": ScoreRouting("sigmoid", is_normed=False),
    "sigmoid, normalized and scaled": ScoreRouting("sigmoid", is_normed=True, scale=2.5),
    "softmax": ScoreRouting("softmax", is_normed=True, min_sum=0.3),
    "sigmoid groups": ScoreRouting("sigmoid", is_normed=True, num_groups=4, num_top_groups=2),
    "softmax groups": ScoreRouting("softmax", is_normed=False, num_groups=10, num_top_groups=3, scale=0.5),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("routing", SCORE_ROUTINGS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_routes_by_scores_agree_with_the_reference(
    ops: Ops, dtype: torch.dtype, routing: str, has_bias: bool
) -> None:
    num_rows, num_experts = 33, 60
    # These logits are distinct in bfloat16 as well.
    distinct_logits = torch.stack([torch.randperm(num_experts) for _ in range(num_rows)]) / 8 - 3.5
    logits = torch.cat([distinct_logits, torch.full((num_rows, 3), 99.0)], dim=1).to(dtype)[:, :num_experts]
    bias = torch.randn(num_experts) / 5 if has_bias else None
    assert_agrees(lambda ops: ops.route(logits, 6, SCORE_ROUTINGS[routing], bias), ops)


def test_routes_by_sigmoid_scores_in_groups_agree_with_their_definition() -> None:
    logits, bias = torch.randn(9, 12).double(), torch.randn(12).double() / 5
    routing = ScoreRouting("sigmoid", is_normed=True, scale=2.5, num_groups=4, num_top_groups=2)
    topk_weights, topk_ids = REFERENCE.route(logits.float(), 3, routing, bias.float())
    for row in range(9):
        scores = logits[row].sigmoid()
        ranking_scores = (scores + bias).tolist()
        group_scores = [sum(sorted(ranking_scores[3 * g : 3 * g + 3])[-2:]) for g in range(4)]
        selected_groups = sorted(range(4), key=lambda g: -group_scores[g])[:2]
        order = sorted(
            (i for g in selected_groups for i in range(3 * g, 3 * g + 3)), key=lambda i: -ranking_scores[i]
        )[:3]
        assert topk_ids[row].tolist() == order
        expected = 2.5 * scores[order] / scores[order].sum()
        torch.testing.assert_close(topk_weights[row], expected.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [0.01, 0.3])
@pytest.mark.parametrize(("num_experts", "top_k"), [(5, 2), (16, 2), (60, 4)])
def test_routes_of_a_sparse_mixer_agree_with_the_reference(
    ops: Ops, dtype: torch.dtype, eps: float, num_experts: int, top_k: int
) -> None:
    logits = torch.stack([torch.randperm(num_experts) for _ in range(33)]).to(dtype) / 8 - 2
    assert_agrees(lambda ops: ops.route(logits, top_k, SparseMixer(eps)), ops)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor_dtype", DTYPES)
@pytest.mark.parametrize("are_logits", [False, True])
def test_scale_rows_agrees_with_the_reference(
    ops: Ops, dtype: torch.dtype, factor_dtype: torch.dtype, are_logits: bool
) -> None:
    x = torch.randn(33, 100).to(dtype)[:, :50]
    factors = (3 * torch.randn(33, 4)).to(factor_dtype)[:, 1:2]
    assert_agrees(lambda ops: ops.scale_rows(x, factors, are_logits=are_logits), ops)
    float64_factors = factors.double().sigmoid() if are_logits else factors.double()
    expected = (x.double() * float64_factors).to(dtype)
    assert are_close(REFERENCE.scale_rows(x, factors, are_logits=are_logits), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_widen_converts_to_float32(ops: Ops, dtype: torch.dtype) -> None:
    x = torch.randn(33, 100).to(dtype)[:, :50]
    assert torch.equal(ops.widen(x), x.float())


def test_routes_of_equal_and_of_nan_logits_are_valid(ops: Ops) -> None:
    _, topk_ids = ops.route(torch.zeros(2, 40), 3, "chosen")
    assert topk_ids.tolist() == [[0, 1, 2]] * 2
    logits = torch.full((1, 9), torch.nan)
    logits[0, 1], logits[0, 5] = 1, -torch.inf
    _, topk_ids = ops.route(logits, 4, "all_normed")
    assert topk_ids[0, 0] == 1
    assert len(set(topk_ids[0].tolist())) == 4


def test_gated_activation_of_extreme_values_agrees_with_the_reference(ops: Ops) -> None:
    gates = torch.tensor([-1e30, -200.0, -88.0, -0.0, 0.0, 1e-30, 88.0, 200.0, 1e30])
    x = torch.cat([gates, torch.ones_like(gates)])[None]
    for activation in ("silu", "gelu", "relu"):
        assert_agrees(lambda ops, activation=activation: ops.gated_activation(x, activation), ops)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.int64])
def test_row_lookups_and_writes_agree_with_indexing_also_for_invalid_indices(
    ops: Ops, dtype: torch.dtype
) -> None:
    table = (100 * torch.randn(11, 40)).to(dtype)
    rows = torch.tensor([0, 10, 3, 3])
    assert torch.equal(ops.embedding(rows, table), table[rows])
    assert torch.equal(ops.take_rows(table[:, 4:9], rows), table[rows, 4:9])
    values = torch.zeros(2, 80).to(dtype)[:, :40]
    assert torch.equal(ops.put_rows(table, rows[:2], values), REFERENCE.put_rows(table, rows[:2], values))
    slice_of_table = table[:, 3:8]
    result = ops.put_rows(slice_of_table, rows[:2], values[:, :5])
    assert torch.equal(result, REFERENCE.put_rows(slice_of_table, rows[:2], values[:, :5]))
    for out_of_range in (11, -1, -12, 2**40):
        indices = torch.tensor([1, out_of_range])
        if ops.name == "cuda":
            check_invalid_index(ops, table, indices, values)
            continue
        with pytest.raises(IndexError):
            ops.embedding(indices, table)
        if out_of_range != -1:  # the reference accepts -1 as the last row
            with pytest.raises(IndexError):
                ops.put_rows(table, indices, values)


def check_invalid_index(ops: Ops, table: Tensor, indices: Tensor, values: Tensor) -> None:
    """Check the results for an index that is out of range, the second of `indices`.

    For this index, a lookup returns NaN if the table has floats, else 0. A write changes only the row of the
    first index.
    """
    for table_rows in (ops.embedding(indices, table), ops.take_rows(table, indices)):
        assert torch.equal(table_rows[0], table[1])
        assert (table_rows[1].isnan() if table.is_floating_point() else table_rows[1] == 0).all()
    assert torch.equal(ops.put_rows(table, indices, values)[[0, *range(2, 11)]], table[[0, *range(2, 11)]])
    assert torch.equal(ops.put_rows(table, indices, values)[1], values[0])
    if table.dtype == torch.float32:
        for rows, source in zip(ops.rope_rows(indices, table, table[:, :]), (table, table), strict=True):
            assert torch.equal(rows[0], source[1])
            assert rows[1].isnan().all()


@pytest.mark.parametrize("num_rows", [1, 40, 3000])
def test_rope_rows_agree_with_indexing(ops: Ops, num_rows: int) -> None:
    cos, sin = torch.randn(2, 50, 33)
    positions = torch.randint(0, 50, (num_rows,))
    for actual, table in zip(ops.rope_rows(positions, cos, sin), (cos, sin), strict=True):
        assert torch.equal(actual, table[positions])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 64), (37, 40), (130, 96), (5, 7)])
def test_linear_agrees_with_the_reference(
    ops: Ops, dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    weight, bias = torch.randn(out_features, in_features) / in_features**0.5, torch.randn(out_features)
    for packed_weight in (
        ops.pack_linear(weight, str(dtype).removeprefix("torch.")),
        ops.pack_linear(weight, str(dtype).removeprefix("torch."), bias=bias),
    ):
        for num_rows in (1, 2, 3, 4, 5, 7, 8, 9, 33):
            x = torch.randn(num_rows, 2 * in_features).to(dtype)[:, :in_features]
            assert_agrees(lambda ops, x=x, p=packed_weight: ops.linear(x, p), ops)


# ---- adapters ----


def layer_with_adapters(
    ops: Ops,
    rows: Tensor,
    rank: int,
    in_features: int,
    dtype: torch.dtype,
    *,
    has_different_ranks: bool = False,
) -> tuple[PackedLinear, LoRAInputs]:
    """Return a fused linear layer with adapters on all slices but the middle one.

    With ``has_different_ranks``, values of the matrices beyond the rank of an adapter are NaN.
    """
    slice_sizes = {"q": 37, "k": 8, "v": 24}
    stops = [37, 45, 69]
    slices = [
        LinearSlice(n, end - size, end) for (n, size), end in zip(slice_sizes.items(), stops, strict=True)
    ]
    weight = torch.randn(stops[-1], in_features) / in_features**0.5
    packed_weight = ops.pack_linear(weight, str(dtype).removeprefix("torch."), slices=slices)
    num_adapters = max(int(rows.max()) + 1, 1)
    matrices, ranks = {}, {}
    for name in ("q", "v"):
        down = (torch.randn(num_adapters, rank, in_features) / in_features**0.5).to(dtype)
        up = (torch.randn(num_adapters, rank, slice_sizes[name]) / rank**0.5).to(dtype)
        if has_different_ranks:
            ranks[name] = torch.randint(0, rank + 1, (num_adapters,))
            for adapter, adapter_rank in enumerate(ranks[name].tolist()):
                down[adapter, adapter_rank:] = up[adapter, adapter_rank:] = torch.nan
        matrices[name] = (down, up.transpose(1, 2))
    return packed_weight, LoRAInputs(rows, matrices, ranks)


ADAPTERS_OF_ROWS = {
    "single row": [0],
    "none": [-1, -1, -1],
    "one row with an adapter": [-1, 2, -1],
    "another adapter for each row": [3, 0, 2, 1, 4],
    "one adapter for all rows": [1] * 33,
    "a prompt beside single tokens": [0, 2, 1, *[3] * 40, 0, -1, 2],
    "seven rows with one adapter": [2, 2, 2, -1, 2, 2, 2, 2],
}


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("batch_name", ADAPTERS_OF_ROWS)
@pytest.mark.parametrize(("rank", "in_features"), [(4, 16), (1, 64), (9, 50), (64, 33), (256, 40)])
def test_linear_with_adapters_agrees_with_the_reference(
    ops: Ops, dtype: torch.dtype, batch_name: str, rank: int, in_features: int
) -> None:
    rows = torch.tensor(ADAPTERS_OF_ROWS[batch_name])
    x = torch.randn(len(rows), 2 * in_features).to(dtype)[:, :in_features]
    for has_different_ranks in (False, True):
        packed_weight, lora = layer_with_adapters(
            ops, rows, rank, in_features, dtype, has_different_ranks=has_different_ranks
        )
        assert_agrees(lambda ops, p=packed_weight, a=lora: ops.linear(x, p, lora=a), ops)
        actual, plain_result = ops.linear(x, packed_weight, lora=lora), ops.linear(x, packed_weight)
        # Rows and slices without an adapter are bit-equal to the result without adapters.
        assert torch.equal(actual[rows < 0], plain_result[rows < 0])
        assert torch.equal(actual[:, 37:45], plain_result[:, 37:45])
        assert has_different_ranks or (rows < 0).all() or not are_close(actual, plain_result)


def test_contiguous_or_float64_adapter_matrices_agree_with_the_reference(ops: Ops) -> None:
    packed_weight, lora = layer_with_adapters(ops, torch.tensor([0, 1, -1]), 5, 24, torch.float32)
    x = torch.randn(3, 24)
    contiguous_matrices = {name: (down, up.contiguous()) for name, (down, up) in lora.matrices.items()}
    assert_agrees(
        lambda ops: ops.linear(x, packed_weight, lora=LoRAInputs(lora.rows, contiguous_matrices)), ops
    )
    float64_matrices = {name: (down.double(), up.double()) for name, (down, up) in lora.matrices.items()}
    assert_agrees(lambda ops: ops.linear(x, packed_weight, lora=LoRAInputs(lora.rows, float64_matrices)), ops)


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapter_sums_of_a_row_are_bit_equal_in_any_batch(ops: Ops, dtype: torch.dtype) -> None:
    """The weight of the layer is zero, so that the results are only the products of the adapters."""
    rows = torch.randint(-1, 4, (60,))
    packed_weight, lora = layer_with_adapters(ops, rows, 12, 40, dtype, has_different_ranks=True)
    zero_layer = ops.pack_linear(torch.zeros(69, 40), packed_weight.encoding, slices=packed_weight.slices)
    x = torch.randn(60, 40).to(dtype)
    full_result = ops.linear(x, zero_layer, lora=lora)
    for row_indices in (torch.tensor([7]), torch.arange(5, 18), torch.randperm(60)):
        assert torch.equal(
            ops.linear(x[row_indices], zero_layer, lora=lora.take(row_indices)), full_result[row_indices]
        )


LORA_MUTATIONS: dict[str, Callable[[LoRAInputs], LoRAInputs]] = {
    "adapters swapped": lambda a: LoRAInputs(
        a.rows, {n: (down.roll(1, 0), up) for n, (down, up) in a.matrices.items()}
    ),
    "rows shifted by one": lambda a: LoRAInputs(a.rows.roll(1), a.matrices),
    "half the scale": lambda a: LoRAInputs(
        a.rows, {n: (down, up / 2) for n, (down, up) in a.matrices.items()}
    ),
    "rank too small by one": lambda a: LoRAInputs(a.rows, a.matrices, {"q": torch.full((4,), 3)}),
    "adapter of one slice only": lambda a: LoRAInputs(a.rows, {"q": a.matrices["q"]}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mutation", LORA_MUTATIONS)
def test_the_comparison_detects_a_mutated_adapter(ops: Ops, dtype: torch.dtype, mutation: str) -> None:
    packed_weight, lora = layer_with_adapters(ops, torch.tensor([0, 3, -1, 1, 2]), 4, 16, dtype)
    x = torch.randn(5, 16).to(dtype)
    expected = REFERENCE.linear(x, packed_weight, lora=lora)
    assert are_close(ops.linear(x, packed_weight, lora=lora), expected)
    assert not are_close(ops.linear(x, packed_weight, lora=LORA_MUTATIONS[mutation](lora)), expected)


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=40), st.randoms())
def test_rows_are_grouped_by_adapter(rows: list[int], random: Random) -> None:
    lora = LoRAInputs(torch.tensor(rows), {})
    visited_rows = []
    for adapter, adapter_rows in lora.groups:
        assert len(adapter_rows)
        assert [rows[row] for row in adapter_rows.tolist()] == [adapter] * len(adapter_rows)
        visited_rows += adapter_rows.tolist()
    assert sorted(visited_rows) == [row for row, adapter in enumerate(rows) if adapter >= 0]
    row_indices = random.choices(range(len(rows)), k=5)
    assert lora.take(torch.tensor(row_indices)).rows.tolist() == [rows[row] for row in row_indices]


# ---- the paged KV cache ----


def fused_qkv(
    num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return queries, keys and values as views of one tensor ``[T, (H + 2K) D]``.

    Their rows are strided.
    """
    qkv = torch.randn(num_rows, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    return (
        qkv[:, :num_heads],
        qkv[:, num_heads : num_heads + num_kv_heads],
        qkv[:, num_heads + num_kv_heads :],
    )


@dataclass(frozen=True)
class Batch:
    """A batch of sequences of different lengths, with the KV cache of one layer."""

    kv: LayerKV
    row_offsets: Tensor
    lengths: Tensor


def ragged_batch(
    rows_and_lengths: list[tuple[int, int]],
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None = None,
) -> Batch:
    """Return a batch with the given (number of queries, length) of each sequence.

    Slots after the last token of a sequence are NaN.
    """
    rows = torch.tensor([num_rows for num_rows, _ in rows_and_lengths])
    lengths = torch.tensor([length for _, length in rows_and_lengths])
    block_counts = [-(-length // block_size) for length in lengths.tolist()]
    block_ids = (torch.randperm(sum(block_counts)) + 1).tolist()
    cache = torch.full((2, len(block_ids) + 1, num_kv_heads, block_size, head_dim), torch.nan)
    cache[:, 0] = 0
    block_tables = torch.zeros(len(block_counts), max(block_counts) + 1, dtype=torch.int32)
    slots = []
    for b, (num_rows, length) in enumerate(rows_and_lengths):
        num_freed = 0 if window is None else max(0, length - num_rows - window + 1) // block_size
        for column in range(num_freed, block_counts[b]):  # blocks before the window are the null block
            block_tables[b, column] = block = block_ids.pop()
            num_filled = min(block_size, length - column * block_size)
            cache[:, block, :, :num_filled] = torch.randn(2, num_kv_heads, num_filled, head_dim)
        positions = torch.arange(length - num_rows, length)
        slots.append(block_tables[b, positions // block_size].long() * block_size + positions % block_size)
    row_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)]).int()
    return Batch(LayerKV(cache.to(dtype), block_tables, torch.cat(slots), window), row_offsets, lengths.int())


def attend(ops: Ops, q: Tensor, batch: Batch, **options: object) -> Tensor:
    scale = q.shape[2] ** -0.5
    return ops.attention(q, batch.kv, batch.row_offsets, batch.lengths, **{"scale": scale, **options})


QUERIES_AND_LENGTHS = {
    "first token": [(1, 1)],
    "decode": [(1, 7), (1, 33), (1, 64), (1, 65)],
    "prompt": [(33, 33)],
    "chunk": [(8, 40)],
    "mixed batch": [(1, 70), (8, 8), (33, 100), (3, 5)],
    "several key chunks": [(1, 1300), (5, 600), (1, 512), (1, 513)],
    "a long prompt": [(150, 150)],
}


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_name", QUERIES_AND_LENGTHS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (8, 2), (6, 2), (8, 1), (5, 1), (20, 1)])
def test_attention_of_every_kind_of_batch_agrees_with_the_reference(
    ops: Ops, dtype: torch.dtype, batch_name: str, num_heads: int, num_kv_heads: int
) -> None:
    batch = ragged_batch(QUERIES_AND_LENGTHS[batch_name], num_kv_heads, 32, 16, dtype)
    q, _, _ = fused_qkv(int(batch.row_offsets[-1]), num_heads, num_kv_heads, 32, dtype)
    assert_agrees(lambda ops: attend(ops, q, batch), ops)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [4, 8, 16, 24, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_attention_with_several_head_dimensions_and_block_sizes_agrees_with_the_reference(
    ops: Ops, dtype: torch.dtype, head_dim: int, block_size: int
) -> None:
    batch = ragged_batch(QUERIES_AND_LENGTHS["mixed batch"], 2, head_dim, block_size, dtype)
    q, _, _ = fused_qkv(45, 6, 2, head_dim, dtype)
    assert_agrees(lambda ops: attend(ops, q, batch), ops)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 5, 16, 64, 600])
@pytest.mark.parametrize("batch_name", ["decode", "prompt", "mixed batch", "several key chunks"])
def test_chunked_attention_agrees_with_the_reference(
    ops: Ops, dtype: torch.dtype, window: int, batch_name: str
) -> None:
    batch = ragged_batch(QUERIES_AND_LENGTHS[batch_name], 2, 16, 16, dtype, window)
    kv = replace(batch.kv, is_chunked=True)
    q, _, _ = fused_qkv(int(batch.row_offsets[-1]), 4, 2, 16, dtype)
    actual, expected = (attend(back_end, q, replace(batch, kv=kv)) for back_end in (ops, REFERENCE))
    assert are_close(actual, expected)
    if batch_name == "several key chunks" and window > 1:
        assert not are_close(actual, attend(ops, q, batch)), "chunks must differ from a window"


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 5, 16, 64, 600])
@pytest.mark.parametrize("batch_name", ["decode", "prompt", "mixed batch", "several key chunks"])
def test_attention_with_a_window_agrees_with_the_reference(
    ops: Ops, dtype: torch.dtype, window: int, batch_name: str
) -> None:
    batch = ragged_batch(QUERIES_AND_LENGTHS[batch_name], 2, 16, 16, dtype, window)
    q, _, _ = fused_qkv(int(batch.row_offsets[-1]), 4, 2, 16, dtype)
    assert_agrees(lambda ops: attend(ops, q, batch), ops)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_with_soft_cap_and_sinks_agrees_with_the_reference(ops: Ops, dtype: torch.dtype) -> None:
    batch = ragged_batch(QUERIES_AND_LENGTHS["mixed batch"], 2, 32, 16, dtype, window=40)
    q, _, _ = fused_qkv(45, 8, 2, 32, dtype)
    sinks = torch.randn(8)
    assert_agrees(lambda ops: attend(ops, q, batch, soft_cap=2.0, scale=0.5), ops)
    assert_agrees(lambda ops: attend(ops, q, batch, sinks=sinks), ops)
    assert_agrees(lambda ops: attend(ops, q, batch, sinks=sinks.bfloat16(), soft_cap=30.0), ops)
    assert not are_close(attend(ops, q, batch), attend(ops, q, batch, sinks=sinks))
    assert not are_close(attend(ops, q, batch), attend(ops, q, batch, soft_cap=2.0))


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_attention_over_a_cache_of_another_type_agrees_with_the_reference(
    ops: Ops, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    batch = ragged_batch(QUERIES_AND_LENGTHS["mixed batch"], 2, 32, 16, cache_dtype)
    q, k, v = fused_qkv(45, 4, 2, 32, dtype)
    ops.store_kv(k, v, batch.kv)
    assert_agrees(lambda ops: attend(ops, q, batch), ops)


# ---- quantized KV caches ----


def to_int8_cache(batch: Batch) -> Batch:
    """Return the batch with its keys and values in an int8 KV cache. Scales of unused slots are NaN."""
    keys_and_values = batch.kv.cache.float()
    scales = keys_and_values.abs().amax(-1).clamp_min(1e-12) / 127
    cache = (keys_and_values / scales[..., None]).nan_to_num(127).round().to(torch.int8)
    return replace(batch, kv=replace(batch.kv, cache=cache, scales=scales))


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_name", QUERIES_AND_LENGTHS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (8, 2), (6, 2), (8, 1), (5, 1), (20, 1)])
def test_attention_over_an_int8_cache_agrees_with_the_reference(
    ops: Ops, dtype: torch.dtype, batch_name: str, num_heads: int, num_kv_heads: int
) -> None:
    batch = to_int8_cache(ragged_batch(QUERIES_AND_LENGTHS[batch_name], num_kv_heads, 32, 16, torch.float32))
    q, _, _ = fused_qkv(int(batch.row_offsets[-1]), num_heads, num_kv_heads, 32, dtype)
    assert_agrees(lambda ops: attend(ops, q, batch), ops)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 128])
def test_attention_over_an_int8_cache_with_several_head_dimensions_agrees_with_the_reference(
    ops: Ops, dtype: torch.dtype, head_dim: int, block_size: int
) -> None:
    batch = to_int8_cache(
        ragged_batch(QUERIES_AND_LENGTHS["mixed batch"], 2, head_dim, block_size, torch.float32)
    )
    q, _, _ = fused_qkv(45, 6, 2, head_dim, dtype)
    assert_agrees(lambda ops: attend(ops, q, batch), ops)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 16, 77, 600])
@pytest.mark.parametrize("batch_name", ["decode", "prompt", "several key chunks"])
def test_attention_over_an_int8_cache_with_a_window_sinks_and_soft_cap_agrees_with_the_reference(
    ops: Ops, dtype: torch.dtype, window: int, batch_name: str
) -> None:
    batch = to_int8_cache(ragged_batch(QUERIES_AND_LENGTHS[batch_name], 2, 32, 16, torch.float32, window))
    q, _, _ = fused_qkv(int(batch.row_offsets[-1]), 8, 2, 32, dtype)
    sinks = torch.randn(8)
    assert_agrees(lambda ops: attend(ops, q, batch), ops)
    assert_agrees(lambda ops: attend(ops, q, batch, sinks=sinks, soft_cap=2.0, scale=0.5), ops)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_name", QUERIES_AND_LENGTHS)
@pytest.mark.parametrize("is_fixed", [False, True])
def test_attention_over_an_fp8_cache_agrees_with_the_reference(
    ops: Ops, dtype: torch.dtype, batch_name: str, is_fixed: bool
) -> None:
    batch = ragged_batch(QUERIES_AND_LENGTHS[batch_name], 2, 80, 16, torch.float32, 77)
    scales = batch.kv.cache.float().abs().amax(-1).clamp_min(1e-12) / 448
    if is_fixed:
        scales = torch.tensor([0.01, 0.02, 0.03, 0.04]).view(2, 1, 2, 1).expand(scales.shape)
    cache = (batch.kv.cache / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    batch = replace(batch, kv=replace(batch.kv, cache=cache, scales=scales, has_fixed_scales=is_fixed))
    q, k, v = fused_qkv(int(batch.row_offsets[-1]), 6, 2, 80, dtype)
    assert_agrees(lambda ops: attend(ops, q, batch, sinks=torch.ones(6), soft_cap=2.0), ops)
    ops.store_kv(k, v, batch.kv)
    assert_agrees(lambda ops: attend(ops, q, batch), ops)


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_queries_and_nan_keys_and_values_propagate_with_an_int8_cache(
    ops: Ops, dtype: torch.dtype
) -> None:
    """An int8 number cannot be NaN, so the scale of a key or value that contains NaN is NaN."""
    batch = to_int8_cache(ragged_batch([(2, 40), (1, 70)], 2, 64, 16, torch.float32))
    q, k, v = fused_qkv(3, 4, 2, 64, dtype)
    for non_finite in (torch.nan, torch.inf):
        queries = q.clone()
        queries[1, 2, 63] = non_finite
        attended = attend(ops, queries, batch)
        assert attended[1, 2].isnan().all()
        assert attended[[0, 2]].isfinite().all()
        assert attended[1, [0, 1, 3]].isfinite().all()
    for key_or_value in (0, 1):
        keys_and_values = [k.clone(), v.clone()]
        keys_and_values[key_or_value][2, 0, 5] = torch.nan
        kv = replace(batch.kv, cache=batch.kv.cache.clone(), scales=batch.kv.scales.clone())
        ops.store_kv(*keys_and_values, kv)
        assert kv.scales[key_or_value].isnan().sum() == batch.kv.scales[key_or_value].isnan().sum() + 1
        attended = attend(ops, q, replace(batch, kv=kv))
        assert attended[2, :2].isnan().all()
        assert attended[2, 2:].isfinite().all()


INT8_CACHE_MUTATIONS: dict[str, Callable[[LayerKV], LayerKV]] = {
    "scale of the previous token": lambda kv: replace(kv, scales=kv.scales.roll(1, 3)),
    "scale of another head": lambda kv: replace(kv, scales=kv.scales.roll(1, 2)),
    "scale of another block": lambda kv: replace(kv, scales=kv.scales.roll(1, 1)),
    "scales of keys and values swapped": lambda kv: replace(kv, scales=kv.scales.flip(0)),
    "blocks of another sequence": lambda kv: replace(kv, block_tables=kv.block_tables.roll(1, 0)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mutation", INT8_CACHE_MUTATIONS)
def test_the_comparison_detects_a_mutated_int8_cache(ops: Ops, dtype: torch.dtype, mutation: str) -> None:
    batch = to_int8_cache(ragged_batch([(2, 64), (2, 64), (1, 64)], 2, 32, 16, torch.float32))
    q, _, _ = fused_qkv(5, 4, 2, 32, dtype)
    expected = attend(REFERENCE, q, batch)
    assert are_close(attend(ops, q, batch), expected)
    mutated_batch = replace(batch, kv=INT8_CACHE_MUTATIONS[mutation](batch.kv))
    assert not are_close(attend(ops, q, mutated_batch), expected)


@pytest.mark.parametrize("num_heads", [71, 160])
def test_attention_of_many_heads_on_one_kv_head_agrees_with_the_reference(ops: Ops, num_heads: int) -> None:
    batch = ragged_batch([(1, 20), (3, 9)], 1, 16, 16, torch.float32)
    q, _, _ = fused_qkv(4, num_heads, 1, 16, torch.float32)
    assert_agrees(lambda ops: attend(ops, q, batch), ops)


def test_large_scores_do_not_overflow(ops: Ops) -> None:
    batch = ragged_batch(QUERIES_AND_LENGTHS["mixed batch"], 2, 16, 16, torch.float32)
    q, _, _ = fused_qkv(45, 4, 2, 16, torch.float32)
    assert_agrees(lambda ops: attend(ops, 50 * q, batch), ops)  # e ** score would overflow


@pytest.mark.parametrize("cache_dtype", [*DTYPES, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 20, 64])
def test_store_kv_agrees_with_the_reference(
    ops: Ops, cache_dtype: torch.dtype, dtype: torch.dtype, head_dim: int
) -> None:
    batch = ragged_batch(QUERIES_AND_LENGTHS["mixed batch"], 2, head_dim, 16, torch.float32)
    _, k, v = fused_qkv(45, 4, 2, head_dim, dtype)
    stored_caches = []
    for back_end in (ops, REFERENCE):
        scales = torch.zeros(batch.kv.cache.shape[:4]) if cache_dtype.itemsize == 1 else None
        kv = replace(batch.kv, cache=torch.zeros_like(batch.kv.cache).to(cache_dtype), scales=scales)
        back_end.store_kv(k, v, kv)
        stored_caches.append(kv.cache.float())
        if scales is not None:
            stored_caches[-1] = torch.cat([kv.cache.float().flatten(), scales.flatten()])
    assert torch.equal(*stored_caches)
    assert stored_caches[0].any()


# ---- mutations that the comparison must detect ----

BATCH_MUTATIONS: dict[str, Callable[[Batch], tuple[Batch, dict[str, object]]]] = {
    "blocks of another sequence": lambda b: (
        replace(b, kv=replace(b.kv, block_tables=b.kv.block_tables.roll(1, 0))),
        {},
    ),
    "twice the scale": lambda b: (b, {"scale": 2 * 32**-0.5}),
    "last key dropped": lambda b: (replace(b, lengths=b.lengths - 1), {}),
    "window too small by one": lambda b: (replace(b, kv=replace(b.kv, window=15)), {}),
    "window too large by one": lambda b: (replace(b, kv=replace(b.kv, window=17)), {}),
    "keys and values swapped": lambda b: (replace(b, kv=replace(b.kv, cache=b.kv.cache.flip(0))), {}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mutation", BATCH_MUTATIONS)
def test_the_comparison_detects_a_mutated_batch(ops: Ops, dtype: torch.dtype, mutation: str) -> None:
    batch = ragged_batch([(2, 70), (2, 70), (1, 70)], 2, 32, 16, dtype, window=16)
    q, _, _ = fused_qkv(5, 4, 2, 32, dtype)
    expected = attend(REFERENCE, q, batch)
    assert are_close(attend(ops, q, batch), expected)
    mutated_batch, options = BATCH_MUTATIONS[mutation](batch)
    assert not are_close(attend(ops, q, mutated_batch, **options), expected)


# ---- sampling ----


def sampling_inputs(num_rows: int, **changed_values: float) -> SamplingInputs:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changed_values
    return SamplingInputs(
        torch.full((num_rows,), values["temperature"]),
        torch.full((num_rows,), int(values["top_k"])),
        torch.full((num_rows,), values["top_p"]),
        torch.full((num_rows,), values["min_p"]),
        torch.rand(num_rows, dtype=torch.float64),
    )


SAMPLING_RULES = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.1},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 40, "temperature": 1.5},
    {"top_k": 100_000},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 2.0},
    {"top_p": 0.01},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
]


@pytest.mark.matrix
@pytest.mark.parametrize("rules", SAMPLING_RULES, ids=str)
@pytest.mark.parametrize("vocabulary_size", [17, 1000, 32003])
@pytest.mark.parametrize("dtype", DTYPES)  # bfloat16 has many equal logits
def test_sampled_tokens_equal_those_of_the_reference(
    ops: Ops, rules: dict[str, float], vocabulary_size: int, dtype: torch.dtype
) -> None:
    num_rows = 60 if vocabulary_size < 5000 else 4
    logits = (3 * torch.randn(num_rows, vocabulary_size)).to(dtype)
    inputs = sampling_inputs(num_rows, **rules)
    expected = REFERENCE.sample(logits, inputs)
    assert torch.equal(ops.sample(logits, inputs), expected)
    mask = torch.randint(-(2**31), 2**31, (num_rows, -(-vocabulary_size // 32))).int()
    expected = REFERENCE.sample(logits, inputs, mask)
    assert torch.equal(ops.sample(logits, inputs, mask), expected)


def test_samples_are_top_k_tokens_and_change_with_top_k_and_top_p(ops: Ops) -> None:
    logits = torch.randn(3000, 60)
    inputs = sampling_inputs(3000, top_k=3)
    top_ids = logits.topk(3).indices
    sampled_ids = ops.sample(logits, inputs)
    assert (top_ids == sampled_ids[:, None]).any(-1).all()
    assert not torch.equal(sampled_ids, ops.sample(logits, replace(inputs, top_k=inputs.top_k + 1)))
    assert not torch.equal(sampled_ids, ops.sample(logits, replace(inputs, top_p=inputs.top_p - 0.5)))


@pytest.mark.parametrize("rules", [{"temperature": 0.0}, {}, {"top_k": 3, "top_p": 0.5}], ids=str)
@pytest.mark.parametrize("vocabulary_size", [17, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_cannot_be_sampled_get_token_minus_one(
    ops: Ops, rules: dict[str, float], vocabulary_size: int, dtype: torch.dtype
) -> None:
    logits = torch.randn(7, vocabulary_size).to(dtype)
    logits[1, vocabulary_size - 1] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    logits[4, 1:] = -torch.inf  # valid, because one token remains
    logits[5, :5] = -torch.inf
    inputs = sampling_inputs(7, **rules)
    mask = torch.full((7, -(-vocabulary_size // 32)), -1, dtype=torch.int32)
    mask[1:3, 0] = 1  # NaN and inf make a row invalid even if the mask excludes their token
    mask[1, (vocabulary_size - 1) // 32] &= 1
    mask[6] = 0
    for allowed_mask, invalid_rows in ((None, [1, 2, 3]), (mask, [1, 2, 3, 6])):
        tokens = ops.sample(logits, inputs, allowed_mask)
        assert [row for row, token in enumerate(tokens.tolist()) if token < 0] == invalid_rows
        assert (tokens[invalid_rows] == -1).all()
        assert tokens[4] == 0
        assert tokens[5] >= 5
        assert torch.equal(tokens, REFERENCE.sample(logits, inputs, allowed_mask))


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_samples_at_the_ends_of_the_distribution_agree_with_the_reference(ops: Ops, uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf, 0.5, -torch.inf]]).repeat(3, 1)
    inputs = sampling_inputs(3)
    inputs = replace(
        inputs,
        uniforms=torch.full((3,), uniform, dtype=torch.float64),
        temperature=torch.tensor([0.01, 1, 100]),
        top_p=torch.tensor([1.0, 1.0, 0.7]),
    )
    assert torch.equal(ops.sample(logits, inputs), REFERENCE.sample(logits, inputs))


@pytest.mark.parametrize("rules", [{"top_k": 3}, {"top_k": 3, "top_p": 0.5}, {"temperature": 0.0}])
def test_equal_logits_rank_by_token_id(ops: Ops, rules: dict[str, float]) -> None:
    logits = torch.tensor([[0.0, 1, 1, 0, 1, 1, -1, 1]]).repeat(100, 1)
    inputs = sampling_inputs(100, **rules)
    sampled_ids = ops.sample(logits, inputs)
    assert torch.equal(sampled_ids, REFERENCE.sample(logits, inputs))
    assert set(sampled_ids.tolist()) <= {1, 2, 4}
