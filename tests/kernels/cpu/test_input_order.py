"""Weights with permuted inputs: products equal the products of the permuted activations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.kernels import PackedExperts, PackedLinear, encoding_named, unpack_linear
from penstock.kernels.cpu import variants
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.reference import ReferenceOps

VARIANTS = {ops.isa: ops for ops in variants()}


@pytest.fixture(params=VARIANTS or [pytest.param("none", marks=pytest.mark.skip("no kernels are built"))])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    torch.manual_seed(0)
    return VARIANTS[request.param]


def random_layer(ops: CpuOps, out_features: int, in_features: int, encoding: str = "uint4") -> PackedLinear:
    """Return a layer with random weights whose inputs are stored in a random order."""
    rows = encoding_named(encoding).pack(torch.randn(out_features, in_features) / in_features**0.5)
    order = torch.randperm(in_features).int()
    return ops.pack_quantized(rows, encoding, bias=torch.randn(out_features).bfloat16(), order=order)


@pytest.mark.parametrize("encoding", ["uint4", "uint8", "nf4", "q6_k"])
@pytest.mark.parametrize("in_features", [96, 300])
def test_products_equal_the_products_of_permuted_activations(
    ops: CpuOps, encoding: str, in_features: int
) -> None:
    packed_weight = random_layer(ops, 70, in_features, encoding)
    assert packed_weight.order is not None
    x = torch.randn(40, in_features + 8).bfloat16()[:, 4 : 4 + in_features]  # the rows are strided
    for num_rows in (1, 5, 40):
        y = ops.linear(x[:num_rows], packed_weight)
        assert torch.equal(
            y, ops.linear(x[:num_rows, packed_weight.order], replace(packed_weight, order=None))
        )
        expected = x[:num_rows].float() @ unpack_linear(packed_weight).T + packed_weight.bias.float()
        assert float((y.float() - expected).norm() / expected.norm()) < 0.02
        torch.testing.assert_close(
            y, ReferenceOps().linear(x[:num_rows], packed_weight), rtol=0.02, atol=0.02
        )


def test_an_encoding_without_groups_falls_back_to_the_reference(
    ops: CpuOps, caplog: pytest.LogCaptureFixture
) -> None:
    packed_weight = random_layer(ops, 70, 96, "int8")
    x = torch.randn(3, 96).bfloat16()
    assert torch.equal(ops.linear(x, packed_weight), ReferenceOps().linear(x, packed_weight))
    assert "int8 weights with permuted inputs" in caplog.text


def test_each_expert_applies_its_own_order(ops: CpuOps) -> None:
    hidden_size, inner_size, num_experts = 96, 160, 5
    gate_up = tuple(random_layer(ops, 2 * inner_size, hidden_size) for _ in range(num_experts))
    experts = PackedExperts(
        gate_up, tuple(random_layer(ops, hidden_size, inner_size) for _ in range(num_experts))
    )
    for num_rows in (1, 7, 300):
        x = torch.randn(num_rows, hidden_size).bfloat16()
        weights, ids = ReferenceOps().route(torch.randn(num_rows, num_experts), 2, "all")
        result = ops.experts(x, experts, weights, ids, "silu")
        assert torch.equal(result, ReferenceOps.experts(ops, x, experts, weights, ids, "silu"))
