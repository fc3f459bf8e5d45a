"""Many sizes of each operation in Triton's interpreter, and bit-equality of rows alone and in a batch.

`test_interpreter.py` runs this file in a separate process, with ``--slow``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from kernels.cuda.interpreted_attention import (
    TOLERANCE,
    AttentionCase,
    assert_agrees_with_reference,
    attention_inputs,
)
from support.float_activations import FloatActivations
from support.interpreted_dots import use_exact_dots
from torch import Tensor

from penstock.kernels import ENCODINGS, LayerKV, PackedExperts, SamplingInputs
from penstock.kernels.cuda import attention
from penstock.kernels.cuda.ops import CudaOps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

REFERENCE = FloatActivations()
CACHES = ("same", "int8", "fp8", "fixed")
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def ops() -> CudaOps:
    return CudaOps()


@pytest.fixture
def deterministic_ops() -> CudaOps:
    cuda_ops = CudaOps()
    cuda_ops.require_determinism()
    return cuda_ops


def assert_close(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    assert actual.dtype == expected.dtype
    tolerance = tolerance or TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


def attention_cases() -> list[AttentionCase]:
    """Return cases of all combinations of sizes and caches. The other options vary from case to case."""
    sizes = product((48, 72, 80, 96, 112, 192, 256, 512), ((7, 1), (7, 2), (1, 71), (3, 9)), CACHES)
    return [
        AttentionCase(
            head_dim=head_dim,
            heads_per_kv_head=heads_per_kv_head,
            num_kv_heads=num_kv_heads,
            dtype=DTYPES[i % 3],
            cache_kind=cache_kind,
            block_size=(16, 32, 64, 128)[i % 4],
            window=(None, 3, 65)[i % 3],
            soft_cap=(None, 7.0)[i % 2],
            has_sinks=i % 5 == 0,
            num_span_rows=(0, 4, 0)[i % 3],
            is_deterministic=i % 2 == 0,
            sequences=((1, 40), (5, 33), (3, 3)),
            seed=i,
        )
        for i, (head_dim, (num_kv_heads, heads_per_kv_head), cache_kind) in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    "case", attention_cases(), ids=lambda case: f"{case.head_dim}-{case.cache_kind}-{case.seed}"
)
def test_attention_cases_agree_with_the_reference(case: AttentionCase) -> None:
    assert_agrees_with_reference(case)


@pytest.mark.parametrize("size", [1, 2, 17, 100, 300])
def test_attention_of_batches_of_any_size_agrees_with_the_reference(size: int) -> None:
    decoding_sequences = tuple((1, 1 + 7 * j % 50) for j in range(size))
    assert_agrees_with_reference(
        AttentionCase(heads_per_kv_head=2, dtype=torch.bfloat16, sequences=decoding_sequences, seed=size)
    )
    mixed_sequences = tuple((j % 3, max(j % 3, 1 + 7 * j % 20)) for j in range(size))
    assert_agrees_with_reference(
        AttentionCase(
            head_dim=80, cache_kind="fp8", sequences=mixed_sequences, is_deterministic=True, seed=size
        )
    )


@pytest.mark.parametrize(
    ("cache_kind", "head_dim", "heads_per_kv_head", "num_kv_heads", "dtype"),
    [
        ("same", 80, 2, 7, torch.bfloat16),
        ("fp8", 96, 1, 7, torch.bfloat16),
        ("int8", 112, 3, 1, torch.float32),
        ("fixed", 64, 4, 2, torch.float16),
    ],
)
def test_attention_is_bit_equal_alone_and_in_a_batch(
    deterministic_ops: CudaOps, monkeypatch: pytest.MonkeyPatch, cache_kind: str, head_dim: int,
    heads_per_kv_head: int, num_kv_heads: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Results are bit-equal in any batch, with and without splitting the keys among programs."""
    sequences = ((1, 1300), (1, 513), (1, 512), (3, 700), (1, 20), (0, 9))
    case = AttentionCase(
        head_dim=head_dim,
        heads_per_kv_head=heads_per_kv_head,
        num_kv_heads=num_kv_heads,
        dtype=dtype,
        cache_kind=cache_kind,
        block_size=32,
        sequences=sequences,
    )
    q, kv, row_offsets, lengths, options = attention_inputs(case)
    num_processors = [1]
    monkeypatch.setattr(attention, "num_processors", lambda device: num_processors[0])
    full_result = deterministic_ops.attention(q, kv, row_offsets, lengths, **options)
    for num_processors[0] in (1, 10**6):
        for b in range(5):
            rows = slice(int(row_offsets[b]), int(row_offsets[b + 1]))
            single_kv = replace(kv, block_tables=kv.block_tables[b : b + 1])
            single_offsets = torch.tensor([0, rows.stop - rows.start]).int()
            single_result = deterministic_ops.attention(
                q[rows], single_kv, single_offsets, lengths[b : b + 1], **options
            )
            assert torch.equal(single_result, full_result[rows])


@pytest.mark.parametrize("width", [80, 896, 4096])
def test_norms_are_bit_equal_alone_and_in_a_batch(deterministic_ops: CudaOps, width: int) -> None:
    x, residual = torch.randn(2, 300, width).bfloat16()
    weight, bias = torch.randn(2, width)
    rms_norm_result = deterministic_ops.add_rms_norm(x, residual, weight, 1e-6)[0]
    layer_norm_result = deterministic_ops.add_layer_norm(x, residual, weight, bias, 1e-6)[0]
    for row in (0, 17, 299):
        row_slice = slice(row, row + 1)
        assert torch.equal(
            deterministic_ops.add_rms_norm(x[row_slice], residual[row_slice], weight, 1e-6)[0],
            rms_norm_result[row_slice],
        )
        single_result = deterministic_ops.add_layer_norm(
            x[row_slice], residual[row_slice], weight, bias, 1e-6
        )[0]
        assert torch.equal(single_result, layer_norm_result[row_slice])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_products_are_bit_equal_alone_and_in_a_batch(
    deterministic_ops: CudaOps, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_exact_dots(monkeypatch)
    packed_weight = deterministic_ops.pack_linear(torch.randn(70, 160), encoding)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(70, 160).to(dtype)
        full_result = deterministic_ops.linear(x, packed_weight)
        for selected_rows in ([5], [69, 0, 7], list(range(33))):
            assert torch.equal(
                deterministic_ops.linear(x[selected_rows], packed_weight), full_result[selected_rows]
            )


def test_samples_are_equal_alone_and_in_a_batch(deterministic_ops: CudaOps) -> None:
    num_rows = 12
    sampling_inputs = SamplingInputs(
        torch.full((num_rows,), 0.8),
        torch.full((num_rows,), 40),
        torch.full((num_rows,), 0.9),
        torch.zeros(num_rows),
        torch.rand(num_rows, dtype=torch.float64),
    )
    logits = torch.randn(num_rows, 5000)
    tokens = deterministic_ops.sample(logits, sampling_inputs)
    for row in range(num_rows):
        single_result = deterministic_ops.sample(
            logits[row : row + 1], sampling_inputs.take(torch.tensor([row]))
        )
        assert single_result[0] == tokens[row]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 80, 576, 896, 1152, 5120])
def test_rms_norms_and_activations_agree_with_the_reference(
    ops: CudaOps, dtype: torch.dtype, width: int
) -> None:
    x, residual = torch.randn(2, 5, width).to(dtype)
    weight = torch.randn(width)
    for norm_weight in (weight, weight.to(dtype)):
        results = zip(
            ops.add_rms_norm(x, residual, norm_weight, 1e-6),
            REFERENCE.add_rms_norm(x, residual, norm_weight, 1e-6),
            strict=True,
        )
        for actual, expected in results:
            assert_close(actual, expected)
    for activation in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        assert_close(ops.activation(x, activation), REFERENCE.activation(x, activation))  # type: ignore[arg-type]
        assert_close(ops.gated_activation(x, activation), REFERENCE.gated_activation(x, activation))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(80, 80), (96, 32), (112, 56), (192, 192), (256, 64), (20, 10)]
)
def test_rotary_agrees_with_the_reference(
    ops: CudaOps, dtype: torch.dtype, head_dim: int, rotary_dim: int
) -> None:
    q, k = torch.randn(2, 3, 7, head_dim).to(dtype)
    angles = torch.rand(3, rotary_dim // 2) * 6
    for is_interleaved in (False, True):
        actual, expected = (
            back_end.rotary(q, k, angles.cos(), angles.sin(), is_interleaved=is_interleaved)
            for back_end in (ops, REFERENCE)
        )
        assert_close(actual[0], expected[0])
        assert_close(actual[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [20, 80, 96, 112, 192, 256, 512])
def test_kv_cache_writes_equal_the_reference(ops: CudaOps, dtype: torch.dtype, head_dim: int) -> None:
    k, v = torch.randn(2, 5, 7, head_dim).to(dtype)
    slots = torch.tensor([33, 127, 64, 40, 95])
    for cache_dtype in (dtype, torch.int8, torch.float8_e4m3fn):
        stored_caches = []
        for back_end in (ops, REFERENCE):
            scales = torch.zeros(2, 4, 7, 32)
            cache = torch.zeros(2, 4, 7, 32, head_dim).to(cache_dtype)
            cache_scales = None if cache_dtype == dtype else scales
            back_end.store_kv(k, v, LayerKV(cache, torch.zeros(1, 1).int(), slots, None, cache_scales))
            stored_caches.append((cache.float(), scales))
        assert torch.equal(stored_caches[0][0], stored_caches[1][0])
        assert torch.equal(stored_caches[0][1], stored_caches[1][1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_products_agree_with_the_reference(ops: CudaOps, encoding: str, dtype: torch.dtype) -> None:
    for out_features, in_features in ((33, 96), (70, 130)):
        weight, bias = torch.randn(out_features, in_features), torch.randn(out_features)
        packed_weight, reference_weight = (
            back_end.pack_linear(weight, encoding, bias=bias) for back_end in (ops, REFERENCE)
        )
        for num_rows in (1, 17):
            x = torch.randn(num_rows, in_features).to(dtype)
            tolerance = 1e-3 if dtype == torch.float32 else 4 * TOLERANCE[dtype]
            assert_close(ops.linear(x, packed_weight), REFERENCE.linear(x, reference_weight), tolerance)


@pytest.mark.parametrize("encoding", ["bfloat16", "int8", "uint4", "mxfp4", "nvfp4", "fp8"])
@pytest.mark.parametrize(("num_experts", "top_k", "num_rows"), [(60, 4, 3), (8, 2, 40), (3, 3, 1)])
def test_experts_agree_with_the_reference(
    ops: CudaOps, encoding: str, num_experts: int, top_k: int, num_rows: int
) -> None:
    expert_weights = [(torch.randn(96, 64) / 8, torch.randn(64, 48) / 8) for _ in range(num_experts)]
    x = torch.randn(num_rows, 64).bfloat16()
    weights, ids = REFERENCE.route(torch.randn(num_rows, num_experts), top_k, "all_normed")
    results = []
    for back_end in (ops, REFERENCE):
        packed_experts = PackedExperts(
            tuple(back_end.pack_linear(up, encoding) for up, _ in expert_weights),
            tuple(back_end.pack_linear(down, encoding) for _, down in expert_weights),
        )
        results.append(back_end.experts(x, packed_experts, weights, ids, "silu"))
    assert_close(results[0], results[1], 2.0**-5)


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (384, 8), (1024, 6), (5, 5)])
def test_routes_agree_with_the_reference(ops: CudaOps, num_experts: int, top_k: int) -> None:
    logits = torch.randn(9, num_experts)
    for routing in ("all", "all_normed", "chosen"):
        (weights, ids), (expected, expected_ids) = (
            back_end.route(logits, top_k, routing)  # type: ignore[arg-type]
            for back_end in (ops, REFERENCE)
        )
        assert torch.equal(ids, expected_ids)
        assert_close(weights, expected)


@pytest.mark.parametrize("vocabulary_size", [2, 33, 1000, 32003])
def test_sampled_tokens_equal_the_reference(ops: CudaOps, vocabulary_size: int) -> None:
    num_rows = 7
    sampling_inputs = SamplingInputs(
        torch.rand(num_rows) * 1.5,
        torch.randint(0, 40, (num_rows,)),
        torch.rand(num_rows),
        torch.rand(num_rows) / 9,
        torch.rand(num_rows, dtype=torch.float64),
    )
    logits = 3 * torch.randn(num_rows, vocabulary_size)
    mask = torch.randint(-(2**31), 2**31, (num_rows, -(-vocabulary_size // 32))).int()
    for allowed_mask in (None, mask):
        assert torch.equal(
            ops.sample(logits, sampling_inputs, allowed_mask),
            REFERENCE.sample(logits, sampling_inputs, allowed_mask),
        )
