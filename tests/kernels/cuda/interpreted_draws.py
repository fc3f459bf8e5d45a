"""Products, experts, row operations and sampling in Triton's interpreter, on random sizes.

`test_interpreter.py` runs this file with ``--random -m random`` in a separate process.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.float_activations import FloatActivations
from support.random_draws import num_examples
from torch import Tensor

from penstock.kernels import PackedExperts, SamplingInputs
from penstock.kernels.cuda.ops import CudaOps

pytestmark = pytest.mark.random

REFERENCE = FloatActivations()
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
dtypes = st.sampled_from(list(TOLERANCE))
seeds = st.integers(0, 2**16)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE.get(expected.dtype, 0.0)
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@settings(max_examples=num_examples(6))
@given(
    encoding=st.sampled_from(["int8", "int5", "int4", "uint4", "uint8", "fp8", "bfloat16", "float32"]),
    num_rows=st.integers(1, 70),
    out_features=st.integers(1, 90),
    in_features=st.integers(1, 5).map(lambda num_groups: 32 * num_groups) | st.integers(1, 140),
    is_deterministic=st.booleans(),
    has_bias=st.booleans(),
    seed=seeds,
)
def test_random_products_agree_with_the_reference(
    encoding: str,
    num_rows: int,
    out_features: int,
    in_features: int,
    is_deterministic: bool,
    has_bias: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    ops = CudaOps()
    if is_deterministic:
        ops.require_determinism()
    weight, x = torch.randn(out_features, in_features) / in_features**0.5, torch.randn(num_rows, in_features)
    bias = torch.randn(out_features) if has_bias else None
    x = x.bfloat16() if encoding in ("bfloat16", "fp8") else x
    packed_weight, reference_weight = (
        back_end.pack_linear(weight, encoding, bias=bias) for back_end in (ops, REFERENCE)
    )
    assert_close(ops.linear(x, packed_weight), REFERENCE.linear(x, reference_weight))


@settings(max_examples=num_examples(4))
@given(
    encoding=st.sampled_from(["int8", "int4", "bfloat16", "float32"]),
    num_rows=st.integers(1, 12),
    num_experts=st.integers(1, 9),
    top_k=st.integers(1, 4),
    hidden_size=st.integers(1, 3).map(lambda num_groups: 32 * num_groups),
    inner_size=st.integers(1, 60),
    seed=seeds,
)
def test_random_experts_agree_with_the_reference(
    encoding: str, num_rows: int, num_experts: int, top_k: int, hidden_size: int, inner_size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    top_k = min(top_k, num_experts)
    gate_up = [torch.randn(2 * inner_size, hidden_size) / hidden_size**0.5 for _ in range(num_experts)]
    down = [torch.randn(hidden_size, inner_size) / inner_size**0.5 for _ in range(num_experts)]
    x = torch.randn(num_rows, hidden_size)
    x = x.bfloat16() if encoding == "bfloat16" else x
    results = []
    for ops in (CudaOps(), REFERENCE):
        packed_experts = PackedExperts(
            tuple(ops.pack_linear(weight, encoding) for weight in gate_up),
            tuple(ops.pack_linear(weight, encoding) for weight in down),
        )
        logits = torch.randn(num_rows, num_experts, generator=torch.Generator().manual_seed(seed))
        weights, ids = ops.route(logits, top_k, "chosen")
        results.append(ops.experts(x, packed_experts, weights.to(x.dtype), ids, "silu"))
    assert_close(*results)


@settings(max_examples=num_examples(6))
@given(
    num_rows=st.integers(0, 9),
    width=st.integers(1, 400),
    num_heads=st.integers(1, 5),
    dtype=dtypes,
    seed=seeds,
)
def test_random_row_operations_agree_with_the_reference(
    num_rows: int, width: int, num_heads: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x, residual = torch.randn(2, num_rows, width + 3).to(dtype)[:, :, :width]
    weight, bias = torch.randn(2, width).to(dtype)
    ops = CudaOps()
    for actual, expected in zip(
        (*ops.add_rms_norm(x, residual, weight, 1e-5), ops.layer_norm(x, weight, bias, 1e-5)),
        (*REFERENCE.add_rms_norm(x, residual, weight, 1e-5), REFERENCE.layer_norm(x, weight, bias, 1e-5)),
        strict=True,
    ):
        assert_close(actual, expected)
    gates = torch.randn(num_rows, 2 * width).to(dtype)
    assert_close(ops.gated_activation(gates, "silu"), REFERENCE.gated_activation(gates, "silu"))
    dim = 2 * (width % 40 + 1)
    qk, angles = torch.randn(num_rows, num_heads + 1, dim).to(dtype), torch.rand(num_rows, dim // 2) * 6
    results = [
        back_end.rotary(
            qk[:, :num_heads], qk[:, num_heads:], angles.cos(), angles.sin(), is_interleaved=bool(seed % 2)
        )
        for back_end in (ops, REFERENCE)
    ]
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)


@settings(max_examples=num_examples(6))
@given(
    num_rows=st.integers(1, 5),
    vocabulary_size=st.integers(2, 300),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.integers(0, 20),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    has_mask=st.booleans(),
    has_ties=st.booleans(),
    seed=seeds,
)
def test_random_samples_equal_the_reference(
    num_rows: int,
    vocabulary_size: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    has_mask: bool,
    has_ties: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(num_rows, vocabulary_size) * 3
    logits = logits.round() if has_ties else logits
    mask = torch.randint(-(2**31), 2**31, (num_rows, -(-vocabulary_size // 32))).int() if has_mask else None
    inputs = SamplingInputs(
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), top_k),
        torch.full((num_rows,), top_p),
        torch.full((num_rows,), min_p),
        torch.rand(num_rows, dtype=torch.float64),
    )
    assert torch.equal(CudaOps().sample(logits, inputs, mask), REFERENCE.sample(logits, inputs, mask))
