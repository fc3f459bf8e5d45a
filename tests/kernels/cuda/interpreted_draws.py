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
    rows=st.integers(1, 70),
    outputs=st.integers(1, 90),
    inputs=st.integers(1, 5).map(lambda num_groups: 32 * num_groups) | st.integers(1, 140),
    is_deterministic=st.booleans(),
    has_bias=st.booleans(),
    seed=seeds,
)
def test_random_products_agree_with_the_reference(
    encoding: str,
    rows: int,
    outputs: int,
    inputs: int,
    is_deterministic: bool,
    has_bias: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    ops = CudaOps()
    if is_deterministic:
        ops.require_determinism()
    weight, x = torch.randn(outputs, inputs) / inputs**0.5, torch.randn(rows, inputs)
    bias = torch.randn(outputs) if has_bias else None
    x = x.bfloat16() if encoding in ("bfloat16", "fp8") else x
    packed_weight, reference_weight = (
        back_end.pack_linear(weight, encoding, bias=bias) for back_end in (ops, REFERENCE)
    )
    assert_close(ops.linear(x, packed_weight), REFERENCE.linear(x, reference_weight))


@settings(max_examples=num_examples(4))
@given(
    encoding=st.sampled_from(["int8", "int4", "bfloat16", "float32"]),
    rows=st.integers(1, 12),
    experts=st.integers(1, 9),
    top=st.integers(1, 4),
    hidden=st.integers(1, 3).map(lambda num_groups: 32 * num_groups),
    inner=st.integers(1, 60),
    seed=seeds,
)
def test_random_experts_agree_with_the_reference(
    encoding: str, rows: int, experts: int, top: int, hidden: int, inner: int, seed: int
) -> None:
    torch.manual_seed(seed)
    top = min(top, experts)
    gate_up = [torch.randn(2 * inner, hidden) / hidden**0.5 for _ in range(experts)]
    down = [torch.randn(hidden, inner) / inner**0.5 for _ in range(experts)]
    x = torch.randn(rows, hidden)
    x = x.bfloat16() if encoding == "bfloat16" else x
    results = []
    for ops in (CudaOps(), REFERENCE):
        packed_experts = PackedExperts(
            tuple(ops.pack_linear(weight, encoding) for weight in gate_up),
            tuple(ops.pack_linear(weight, encoding) for weight in down),
        )
        logits = torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed))
        weights, ids = ops.route(logits, top, "chosen")
        results.append(ops.experts(x, packed_experts, weights.to(x.dtype), ids, "silu"))
    assert_close(*results)


@settings(max_examples=num_examples(6))
@given(rows=st.integers(0, 9), width=st.integers(1, 400), heads=st.integers(1, 5), dtype=dtypes, seed=seeds)
def test_random_row_operations_agree_with_the_reference(
    rows: int, width: int, heads: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x, residual = torch.randn(2, rows, width + 3).to(dtype)[:, :, :width]
    weight, bias = torch.randn(2, width).to(dtype)
    ops = CudaOps()
    for actual, expected in zip(
        (*ops.add_rms_norm(x, residual, weight, 1e-5), ops.layer_norm(x, weight, bias, 1e-5)),
        (*REFERENCE.add_rms_norm(x, residual, weight, 1e-5), REFERENCE.layer_norm(x, weight, bias, 1e-5)),
        strict=True,
    ):
        assert_close(actual, expected)
    gates = torch.randn(rows, 2 * width).to(dtype)
    assert_close(ops.gated_activation(gates, "silu"), REFERENCE.gated_activation(gates, "silu"))
    dim = 2 * (width % 40 + 1)
    qk, angles = torch.randn(rows, heads + 1, dim).to(dtype), torch.rand(rows, dim // 2) * 6
    results = [
        back_end.rotary(
            qk[:, :heads], qk[:, heads:], angles.cos(), angles.sin(), is_interleaved=bool(seed % 2)
        )
        for back_end in (ops, REFERENCE)
    ]
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)


@settings(max_examples=num_examples(6))
@given(
    rows=st.integers(1, 5),
    vocabulary=st.integers(2, 300),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.integers(0, 20),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    has_mask=st.booleans(),
    has_ties=st.booleans(),
    seed=seeds,
)
def test_random_samples_equal_the_reference(
    rows: int,
    vocabulary: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    has_mask: bool,
    has_ties: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(rows, vocabulary) * 3
    logits = logits.round() if has_ties else logits
    mask = torch.randint(-(2**31), 2**31, (rows, -(-vocabulary // 32))).int() if has_mask else None
    inputs = SamplingInputs(
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.rand(rows, dtype=torch.float64),
    )
    assert torch.equal(CudaOps().sample(logits, inputs, mask), REFERENCE.sample(logits, inputs, mask))
