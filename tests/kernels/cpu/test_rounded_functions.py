"""Functions that are only as accurate as bfloat16 results need: GELU, and the exponentials of attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.cpu import variants
from penstock.kernels.cpu.ops import CpuOps

VARIANTS = {ops.isa: ops for ops in variants()}


@pytest.fixture(params=VARIANTS or [pytest.param("none", marks=pytest.mark.skip("no kernels are built"))])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return VARIANTS[request.param]


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU with the tanh approximation in float64, in a form without cancellation."""
    float64_x = x.double()
    return float64_x / (1 + torch.exp(-2 * (2 / torch.pi) ** 0.5 * (float64_x + 0.044715 * float64_x**3)))


def test_the_error_of_gelu_is_below_0_6_ulp_for_every_finite_bfloat16_number(ops: CpuOps) -> None:
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = numbers[numbers.isfinite()].view(1, -1)
    y, expected = ops.activation(x, "gelu_tanh").double(), gelu_tanh(x)
    ulp = 2.0 ** (expected.abs().clamp(min=2.0**-110).log2().floor() - 7)
    assert ((y - expected).abs() / ulp).max() < 0.6
    gated_y = ops.gated_activation(torch.cat([x, torch.ones_like(x)], 1), "gelu_tanh")
    assert torch.equal(gated_y.double(), y)


def test_gelu_of_infinity_is_infinity_and_of_minus_infinity_or_nan_is_nan(ops: CpuOps) -> None:
    x = torch.tensor([[torch.inf, -torch.inf, torch.nan, 1.0]]).bfloat16()
    y = ops.activation(x, "gelu_tanh")
    assert y[0, 0] == torch.inf
    assert y[0].isnan().tolist() == [False, True, True, False]


@pytest.mark.parametrize("num_rows", [3, 150])
@pytest.mark.parametrize("scale", [0.05, 0.125, 1.0])
def test_weights_of_attention_add_up_to_one(ops: CpuOps, num_rows: int, scale: float) -> None:
    """All values are 1, so each output is the sum of the weights. Scores differ by up to 60."""
    torch.manual_seed(0)
    q, k = torch.randn(2, num_rows, 3, 64).bfloat16()
    row_offsets = torch.tensor([0, num_rows], dtype=torch.int32)
    for is_causal in (False, True):
        out = ops.encoder_attention(q, k, torch.ones_like(k), row_offsets, scale=scale, is_causal=is_causal)
        assert (out == 1).all()


@pytest.mark.parametrize("num_rows", [3, 150, 700])
@pytest.mark.parametrize("scale", [0.125, 1.0])
def test_attention_is_as_accurate_as_its_rounded_weights(ops: CpuOps, num_rows: int, scale: float) -> None:
    torch.manual_seed(num_rows)
    q, k, v = torch.randn(3, num_rows, 2, 64).bfloat16()
    row_offsets = torch.tensor([0, num_rows], dtype=torch.int32)
    out = ops.encoder_attention(q, k, v, row_offsets, scale=scale).double()
    weights = (torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, v.double())
    squares = torch.einsum("hqk,khd->qhd", weights**2, v.double() ** 2)
    weighted_norm = squares.sqrt()  # the error from rounding the weights is proportional to it
    assert ((out - expected).abs() <= 2.0**-8 * expected.abs() + 2.0**-7 * weighted_norm + 1e-4).all()


def test_a_nan_in_a_query_affects_only_its_row(ops: CpuOps) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 150, 1, 64).bfloat16()
    q[70, 0, 5] = torch.nan
    row_offsets = torch.tensor([0, 150], dtype=torch.int32)
    out = ops.encoder_attention(q, k, v, row_offsets, scale=0.125)
    assert out.isnan().all((1, 2)).nonzero().flatten().tolist() == [70]
    assert out.isnan().any((1, 2)).sum() == 1
