"""The Triton kernels agree with the reference on small shapes, in Triton's interpreter.

`test_interpreter.py` runs this file in another process, because triton reads ``TRITON_INTERPRET`` when
it is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.float_activations import FloatActivations
from support.interpreted_dots import use_exact_dots
from torch import Tensor

from penstock.kernels import (
    ENCODINGS,
    ClampedSwiGLU,
    LayerKV,
    LinearSlice,
    LoRAInputs,
    PackedExperts,
    encoding_named,
    unpack_linear,
)
from penstock.kernels.cuda.ops import CudaOps
from penstock.kernels.nibbles import NIBBLES
from penstock.kernels.spans import ImageSpans

REFERENCE = FloatActivations()
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def ops() -> CudaOps:
    return CudaOps()


@pytest.fixture
def deterministic_ops(monkeypatch: pytest.MonkeyPatch) -> CudaOps:
    cuda_ops = CudaOps()  # replaces products for the whole process, so it runs before `use_exact_dots`
    use_exact_dots(monkeypatch)
    cuda_ops.require_determinism()
    return cuda_ops


def assert_close(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    assert actual.dtype == expected.dtype
    tolerance = tolerance or TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


def call_both(ops: CudaOps, operation: str, *arguments: Any, **options: Any) -> tuple[Any, ...]:
    """Return the result of an operation with the Triton kernels, and the result of the reference."""
    return tuple(getattr(back_end, operation)(*arguments, **options) for back_end in (ops, REFERENCE))


# ---- rows ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_operations_agree_with_the_reference(ops: CudaOps, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 3, 120).to(dtype)[:, :, :100]
    weight, bias = torch.randn(2, 100)
    for norm_weight in (weight, weight.to(dtype)):
        for actual, expected in zip(
            (
                *ops.add_rms_norm(x, residual, norm_weight, 1e-5),
                ops.rms_norm(x.view(3, 1, 100), norm_weight, 1e-5),
            ),
            (
                *REFERENCE.add_rms_norm(x, residual, norm_weight, 1e-5),
                REFERENCE.rms_norm(x[:, None], norm_weight, 1e-5),
            ),
            strict=True,
        ):
            assert_close(actual, expected)
    assert_close(
        ops.add_layer_norm(x, residual, weight, bias, 1e-5)[0],
        REFERENCE.add_layer_norm(x, residual, weight, bias, 1e-5)[0],
    )
    for activation in ("silu", "gelu_tanh", "relu", "relu2"):
        assert_close(ops.gated_activation(x, activation), REFERENCE.gated_activation(x, activation))
    special_values = torch.tensor([[-torch.inf, torch.inf, torch.nan, -0.5]], dtype=dtype)
    for activation in ("relu", "relu2"):
        actual = ops.activation(special_values, activation).float()
        expected = REFERENCE.activation(special_values, activation).float()
        torch.testing.assert_close(actual, expected, equal_nan=True)
    gate = ClampedSwiGLU(1.7, 2.0)
    assert_close(ops.clamped_swiglu(5 * x, gate), REFERENCE.clamped_swiglu(5 * x, gate))
    assert_close(ops.soft_cap(x, 1e5), REFERENCE.soft_cap(x, 1e5))
    assert_close(ops.soft_cap(9 * x, 3.0), REFERENCE.soft_cap(9 * x, 3.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_agrees_with_the_reference(ops: CudaOps, dtype: torch.dtype) -> None:
    qkv, angles = torch.randn(3, 6, 24).to(dtype), torch.rand(3, 8) * 6
    q, k = qkv[:, :4], qkv[:, 4:]
    for is_interleaved in (False, True):
        actual, expected = call_both(
            ops, "rotary", q, k, angles.cos(), angles.sin(), is_interleaved=is_interleaved
        )
        assert_close(actual[0], expected[0])
        assert_close(actual[1], expected[1])


def test_routes_agree_with_the_reference(ops: CudaOps) -> None:
    logits = torch.randn(4, 9)
    for routing in ("all", "all_normed", "chosen"):
        (weights, ids), (expected, expected_ids) = call_both(ops, "route", logits, 3, routing)
        assert torch.equal(ids, expected_ids)
        assert_close(weights, expected)
    assert ops.route(torch.zeros(1, 9), 3, "chosen")[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(37, 3), (64, 1024), (5, 4097), (3, 9000)])
def test_float_products_of_a_single_row_agree_with_the_reference(
    ops: CudaOps, dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    weight, x = (
        (torch.randn(out_features, in_features) / in_features**0.5).to(dtype),
        torch.randn(1, 2 * in_features).to(dtype),
    )
    for bias in (None, torch.randn(out_features)):
        packed_weight = ops.pack_linear(
            weight, "float32" if dtype == torch.float32 else "bfloat16", bias=bias
        )
        assert_close(
            ops.linear(x[:, :in_features], packed_weight), REFERENCE.linear(x[:, :in_features], packed_weight)
        )


# ---- attention ----


def test_attention_without_sequences_is_empty(ops: CudaOps) -> None:
    slots, no_lengths = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
    kv = LayerKV(torch.randn(2, 8, 2, 16, 32), no_lengths.view(0, 16), slots, None, None)
    result = ops.attention(torch.zeros(0, 4, 32), kv, torch.zeros(1).int(), no_lengths, scale=1)
    assert result.shape == (0, 4, 32)


def paged_cache(
    rows_and_lengths: Sequence[tuple[int, int]],
    num_kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    **fields: object,
) -> tuple[LayerKV, Tensor, Tensor]:
    """Return a KV cache, row offsets and lengths. Values after the end of a sequence are NaN."""
    block_counts = [-(-length // 16) for _, length in rows_and_lengths]
    cache = torch.full((2, sum(block_counts) + 1, num_kv_heads, 16, head_dim), torch.nan)
    cache[:, 0] = 0
    block_ids = (torch.randperm(sum(block_counts)) + 1).int().split(block_counts)
    block_tables = torch.zeros(len(block_counts), max(block_counts) + 1, dtype=torch.int32)
    for b, (_, length) in enumerate(rows_and_lengths):
        block_tables[b, : block_counts[b]] = block_ids[b]
        for column, block in enumerate(block_ids[b].tolist()):
            num_filled = min(16, length - 16 * column)
            cache[:, block, :, :num_filled] = torch.randn(2, num_kv_heads, num_filled, head_dim)
    rows = torch.tensor([0, *(num_rows for num_rows, _ in rows_and_lengths)])
    kv = LayerKV(cache.to(dtype), block_tables, torch.zeros(0, dtype=torch.int64), **fields)  # type: ignore[arg-type]
    return kv, rows.cumsum(0).int(), torch.tensor([length for _, length in rows_and_lengths]).int()


ROWS_AND_LENGTHS = [(1, 20), (17, 40), (3, 5)]


def to_int8_cache(kv: LayerKV) -> LayerKV:
    keys_and_values = kv.cache.float()
    scales = keys_and_values.abs().amax(-1) / 127
    return replace(
        kv, cache=(keys_and_values / scales[..., None]).nan_to_num(127).round().to(torch.int8), scales=scales
    )


@pytest.mark.matrix(strength=1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case", ["plain", "window", "chunks", "cap and sinks", "int8 cache", "spans", "decode in splits"]
)
def test_attention_agrees_with_the_reference(ops: CudaOps, dtype: torch.dtype, case: str) -> None:
    fields = {"window": {"window": 9}, "chunks": {"window": 8, "is_chunked": True}}.get(case, {})
    batch = [(1, 600), (1, 33)] if case == "decode in splits" else ROWS_AND_LENGTHS
    kv, row_offsets, lengths = paged_cache(batch, dtype=dtype, **fields)
    q = torch.randn(int(row_offsets[-1]), 6, 20).to(dtype)[:, :, :16]
    if case == "decode in splits":
        kv.cache[0, kv.block_tables[0, 33:38].long()] *= 3  # the largest scores are not in the first split
    options: dict[str, object] = {"scale": 0.3}
    if case == "cap and sinks":
        options |= {"soft_cap": 2.0, "sinks": torch.randn(6)}
    elif case == "int8 cache":
        kv = to_int8_cache(kv)
    elif case == "spans":
        positions = torch.cat([torch.arange(19, 20), torch.arange(23, 40), torch.arange(2, 5)])
        spans = torch.stack([positions, positions + 1], 1)
        spans[4:9] = torch.tensor([26, 31])
        options["spans"] = ImageSpans(spans.int(), row_offsets, lengths)
    actual, expected = call_both(ops, "attention", q, kv, row_offsets, lengths, **options)
    assert_close(actual, expected)


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("cache_dtype", "is_fixed"),
    [*((dtype, False) for dtype in (torch.float32, torch.bfloat16, torch.int8, FP8)), (FP8, True)],
)
def test_kv_cache_writes_equal_the_reference(ops: CudaOps, cache_dtype: torch.dtype, is_fixed: bool) -> None:
    kv, _, _ = paged_cache([(5, 40)])
    k, v = (3 * torch.randn(2, 5, 3, 16)).bfloat16()[:, :, :2]
    v[4, 1] = 0
    stored_caches = []
    for back_end in (ops, REFERENCE):
        scales = torch.zeros(kv.cache.shape[:4]) if cache_dtype in (torch.int8, FP8) else None
        if is_fixed:
            # With these scales, some quotients are beyond 448.
            head_scales = torch.tensor([0.004, 0.7, 1.0, 0.01]).view(2, 1, 2, 1)
            scales = head_scales.expand(kv.cache.shape[:4])
        slots = torch.tensor([17, 40, 3, 33, 18])
        back_end_kv = replace(
            kv,
            cache=torch.zeros_like(kv.cache).to(cache_dtype),
            scales=scales,
            slots=slots,
            has_fixed_scales=is_fixed,
        )
        back_end.store_kv(k, v, back_end_kv)
        cache = back_end_kv.cache.view(torch.uint8) if cache_dtype == FP8 else back_end_kv.cache
        stored_caches.append((cache, cache if scales is None else scales))
    assert torch.equal(stored_caches[0][0], stored_caches[1][0])
    assert torch.equal(stored_caches[0][1], stored_caches[1][1])
    assert stored_caches[0][0].any()
    assert not is_fixed or (stored_caches[0][0] & 127 == 126).any()


def test_conversion_to_8_bit_floats_equals_torch(ops: CudaOps) -> None:
    """Values are clamped to -448..448 and stored as torch converts them; NaN stays NaN."""
    codes = torch.arange(256).to(torch.uint8)
    values = codes.view(FP8).float()[:127].sort().values
    midpoints = (values[1:] + values[:-1]) / 2
    values = torch.cat(
        [values, midpoints, midpoints * (1 + 2**-20), midpoints * (1 - 2**-20), torch.tensor([1e30])]
    )
    values = torch.cat([values, -values, torch.tensor([torch.nan, torch.inf])])
    k = values.view(1, 1, -1)
    ones = torch.ones(2, 1, 1, 1).expand(2, 2, 1, 16)
    kv = LayerKV(
        torch.zeros(2, 2, 1, 16, k.shape[2]).to(FP8), torch.ones(1, 1).int(), torch.tensor([16]), None, ones
    )
    kv = replace(kv, has_fixed_scales=True)
    ops.store_kv(k, k, kv)
    actual, expected = kv.cache[0, 1, 0, 0].float(), values.clamp(-448, 448).to(FP8).float()
    assert torch.equal(actual.nan_to_num(1000), expected.nan_to_num(1000))
    assert actual.isnan().sum() == 1


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"is_causal": True}, {"bias": True}], ids=str)
def test_encoder_attention_agrees_with_the_reference(ops: CudaOps, options: dict[str, object]) -> None:
    row_offsets = torch.tensor([0, 3, 40]).int()
    q, k, v = torch.randn(40, 8, 20).split([4, 2, 2], 1)
    if options.get("bias"):
        options = {"bias": torch.randn(4, 91)}
    actual, expected = call_both(ops, "encoder_attention", q, k, v, row_offsets, scale=0.3, **options)
    assert_close(actual, expected)


# ---- bit-equality in any batch ----


def test_attention_is_bit_equal_in_chunks_batches_and_splits(
    deterministic_ops: CudaOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row has the same bits in a large prefill chunk, in a small chunk, and alone with split keys."""
    num_processors = [1]  # with one processor, one program computes all splits of a tile
    monkeypatch.setattr("penstock.kernels.cuda.attention.num_processors", lambda device: num_processors[0])
    kv, row_offsets, lengths = paged_cache([(20, 540), (1, 530)], 1)
    q = torch.randn(21, 2, 16)
    full_result = deterministic_ops.attention(q, kv, row_offsets, lengths, scale=0.3)
    num_processors[0] = 1000
    swapped_kv = replace(kv, block_tables=kv.block_tables[[1, 0]])
    chunk = torch.tensor([0, 1, 14]).int(), torch.tensor([530, 533]).int()
    batch_result = deterministic_ops.attention(torch.cat([q[20:], q[:13]]), swapped_kv, *chunk, scale=0.3)
    assert torch.equal(batch_result[1:], full_result[:13])
    assert torch.equal(batch_result[0], full_result[20])
    single_kv = replace(kv, block_tables=kv.block_tables[:1])
    single_offsets_and_lengths = torch.tensor([0, 1]).int(), torch.tensor([540]).int()
    assert torch.equal(
        deterministic_ops.attention(q[19:20], single_kv, *single_offsets_and_lengths, scale=0.3),
        full_result[19:20],
    )


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "fp8", "int8", "int4"])
def test_products_are_bit_equal_alone_and_in_a_batch(deterministic_ops: CudaOps, encoding: str) -> None:
    packed_weight = deterministic_ops.pack_linear(torch.randn(20, 70), encoding)
    x = torch.randn(66 if encoding in ("float32", "bfloat16") else 18, 70)
    full_result = deterministic_ops.linear(x, packed_weight)
    for selected_rows in (torch.tensor([7]), torch.tensor([17, 3, 0])):
        assert torch.equal(
            deterministic_ops.linear(x[selected_rows], packed_weight), full_result[selected_rows]
        )


# ---- products ----


QUANTIZED_ENCODINGS = [name for name in ENCODINGS if not encoding_named(name).is_float]


@pytest.mark.parametrize("encoding", QUANTIZED_ENCODINGS)
def test_products_in_every_quantized_encoding_agree_with_the_reference(ops: CudaOps, encoding: str) -> None:
    """The inputs have one row, a few rows, or enough rows that the whole weight is decoded first."""
    weight, bias = torch.randn(20, 330) / 18, torch.randn(20)
    packed_weight, reference_weight = call_both(ops, "pack_linear", weight, encoding, bias=bias)
    assert (packed_weight.layout == NIBBLES) == (encoding_named(encoding).bits == 4)
    assert torch.equal(unpack_linear(packed_weight), unpack_linear(reference_weight))
    for rows, dtype in ((1, torch.float32), (1, torch.bfloat16), (3, torch.float32), (3, torch.bfloat16),
                        (7, torch.float32), (12, torch.float32), (70, torch.float32)):  # fmt: skip
        x = torch.randn(rows, 330).to(dtype)
        assert_close(ops.linear(x, packed_weight), REFERENCE.linear(x, reference_weight))
    x = torch.randn(3, 330)
    x[0, 3], x[1, 2] = 30.0, torch.nan  # the first row has an outlier, the second row has no valid scale
    actual = ops.linear(x, packed_weight)
    assert_close(actual[[0, 2]], REFERENCE.linear(x, reference_weight)[[0, 2]])
    assert actual[1].isnan().all()
    if encoding == "int8":
        for selected_rows in ([0], [2], [0, 2]):
            assert torch.equal(
                ops.linear(x[selected_rows], packed_weight),
                REFERENCE.linear(x[selected_rows], reference_weight),
            )


@pytest.mark.parametrize("encoding", QUANTIZED_ENCODINGS)
def test_products_of_float16_activations_agree_with_the_reference(ops: CudaOps, encoding: str) -> None:
    """The kernel multiplies by weights without row scales, which may exceed the range of float16."""
    packed_weight, reference_weight = call_both(ops, "pack_linear", torch.eye(20, 70) / 9, encoding)
    for num_rows in (1, 3):
        x = torch.randn(num_rows, 70).half()
        assert_close(
            ops.linear(x, packed_weight).float(), REFERENCE.linear(x, reference_weight).float(), 2.0**-9
        )


def test_float16_products_with_large_scales_agree_with_the_reference(ops: CudaOps) -> None:
    """Without row scales, some weights (8 times a scale) are beyond the range of float16."""
    rows = dict(encoding_named("q4_z").pack(torch.randn(20, 70)))
    max_scales = torch.maximum(rows["scales"], rows["minima"].abs()).amax(1).float()
    factor = 2.0 ** torch.floor(torch.log2(60000 / max_scales))
    for name in ("scales", "minima"):
        rows[name] = (rows[name].float() * factor[:, None]).half()
    rows["row_scales"] = rows["row_scales"] / factor
    packed_weight, reference_weight = call_both(ops, "pack_quantized", rows, "q4_z")
    assert (8 * rows["scales"].float()).max() > torch.finfo(torch.float16).max
    for num_rows in (1, 3):
        x = torch.randn(num_rows, 70).half()
        assert_close(
            ops.linear(x, packed_weight).float(), REFERENCE.linear(x, reference_weight).float(), 2.0**-7
        )


@pytest.mark.parametrize("encoding", ["int4", "int5"])
def test_lazily_packed_weights_agree_with_torch(ops: CudaOps, encoding: str) -> None:
    """Lazily packed weights are stored in rows, not in nibbles."""
    weight, x = torch.randn(20, 330) / 18, torch.randn(70, 330)
    packed_weight = ops.pack_lazily([weight], encoding)
    assert_close(ops.linear(x, packed_weight), x @ weight.T)
    exact_weight = unpack_linear(packed_weight)  # `unpack_linear` packs the lazy weight first
    assert packed_weight.layout != NIBBLES
    for num_rows in (1, 3, 70):
        assert_close(ops.linear(x[:num_rows], packed_weight), x[:num_rows] @ exact_weight.T)


def test_products_with_permuted_inputs_agree_with_the_reference(ops: CudaOps) -> None:
    weight, order, x = torch.randn(20, 70), torch.randperm(70).int(), torch.randn(3, 70)
    rows = encoding_named("uint4").pack(weight)
    packed_weight, reference_weight = call_both(ops, "pack_quantized", rows, "uint4", order=order)
    assert packed_weight.layout == NIBBLES
    assert torch.equal(unpack_linear(packed_weight), unpack_linear(reference_weight))
    assert_close(ops.linear(x, packed_weight), REFERENCE.linear(x, reference_weight))
    assert not torch.allclose(ops.linear(x, packed_weight), ops.linear(x, replace(packed_weight, order=None)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_agree_with_the_reference(ops: CudaOps, dtype: torch.dtype) -> None:
    slices = [LinearSlice("q", 0, 12), LinearSlice("k", 12, 17), LinearSlice("v", 17, 30)]
    packed_weight = ops.pack_linear(torch.randn(30, 24) / 5, str(dtype)[6:], slices=slices)
    rows, ranks = torch.tensor([2, -1, 0, 2, 1]), torch.tensor([3, 0, 5])
    matrices = {}
    for name, size in (("q", 12), ("v", 13)):
        down, up = (torch.randn(3, 5, n).to(dtype) / 3 for n in (24, size))
        for adapter, rank in enumerate(ranks.tolist()):
            down[adapter, rank:] = up[adapter, rank:] = torch.nan
        matrices[name] = (down, up.transpose(1, 2))
    lora = LoRAInputs(rows, matrices, {"q": ranks, "v": ranks})
    x = torch.randn(5, 24).to(dtype)
    actual, plain_result = ops.linear(x, packed_weight, lora=lora), ops.linear(x, packed_weight)
    assert_close(actual, REFERENCE.linear(x, packed_weight, lora=lora))
    assert torch.equal(actual[[1, 4]], plain_result[[1, 4]])
    assert torch.equal(actual[:, 12:17], plain_result[:, 12:17])
    assert not torch.equal(actual[0], plain_result[0])


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8", "int4", "mxfp4", "q4_k", "fp8"])
def test_experts_agree_with_the_reference(ops: CudaOps, encoding: str) -> None:
    expert_weights = [(torch.randn(12, 36) / 4, torch.randn(12), torch.randn(36, 6) / 4) for _ in range(4)]
    x = torch.randn(5, 36).to(torch.bfloat16 if encoding == "bfloat16" else torch.float32)
    weights, ids = REFERENCE.route(torch.randn(5, 4), 2, "all")
    results = []
    for back_end in (ops, REFERENCE):
        packed_experts = PackedExperts(
            tuple(back_end.pack_linear(up, encoding, bias=bias) for up, bias, _ in expert_weights),
            tuple(back_end.pack_linear(down, encoding) for _, _, down in expert_weights),
        )
        results.append(back_end.experts(x, packed_experts, weights, ids, "silu"))
    assert_close(*results)
