"""The reference kernels agree with numpy in float64, and with torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.kernels import LayerKV, LinearSlice, LoRAInputs, pack_linear
from penstock.kernels.reference import ReferenceOps

OPS = ReferenceOps()
BLOCK_SIZE = 16


def paged_cache(
    lengths: list[int],
    num_kv_heads: int,
    head_dim: int,
    *,
    window: int | None = None,
    is_int8: bool = False,
    is_fp8: bool = False,
    fixed_scale: float | None = None,
    is_chunked: bool = False,
) -> tuple[LayerKV, list[np.ndarray]]:
    """Return a KV cache with sequences of these lengths in scattered blocks, and their keys and values.

    The keys and values of a sequence are ``[2, L, K, D]``.
    """
    generator = np.random.default_rng(sum(lengths))
    block_counts = [-(-length // BLOCK_SIZE) for length in lengths]
    order = generator.permutation(np.arange(1, sum(block_counts) + 1))
    # NaN, because unwritten slots must not affect results.
    cache = torch.full((2, sum(block_counts) + 1, num_kv_heads, BLOCK_SIZE, head_dim), torch.nan)
    scales = torch.zeros(2, sum(block_counts) + 1, num_kv_heads, BLOCK_SIZE) if is_int8 or is_fp8 else None
    if is_int8:
        cache = torch.zeros_like(cache, dtype=torch.int8)
    if is_fp8:
        cache = cache.to(torch.float8_e4m3fn)
    if scales is not None and fixed_scale is not None:
        scales = torch.full((1, 1, 1, 1), fixed_scale).expand(scales.shape)
    block_tables = torch.zeros(len(lengths), max(block_counts), dtype=torch.int32)
    sequences = []
    for sequence, (length, count) in enumerate(zip(lengths, block_counts, strict=True)):
        blocks = torch.from_numpy(order[:count].astype(np.int64))
        order = order[count:]
        block_tables[sequence, :count] = blocks
        keys_and_values = generator.normal(size=(2, length, num_kv_heads, head_dim)).astype(np.float32)
        positions = torch.arange(length)
        slots = blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        OPS.store_kv(
            torch.from_numpy(keys_and_values[0]),
            torch.from_numpy(keys_and_values[1]),
            LayerKV(cache, block_tables, slots, window, scales, has_fixed_scales=fixed_scale is not None),
        )
        sequences.append(keys_and_values)
    return LayerKV(
        cache, block_tables, torch.zeros(0, dtype=torch.int64), window, scales, is_chunked
    ), sequences


def numpy_attention(
    q: np.ndarray,  # [H, D]
    keys_and_values: np.ndarray,  # [2, L, K, D]
    position: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: np.ndarray | None,
    is_chunked: bool = False,
) -> np.ndarray:
    heads, attended = q.shape[0], np.zeros(q.shape)
    heads_per_kv_head = heads // keys_and_values.shape[2]
    first_key = 0 if window is None else max(0, position - window + 1)
    if is_chunked:
        assert window is not None
        first_key = max(start for start in range(0, position + 1, window))
    for head in range(heads):
        keys, values = keys_and_values[:, first_key : position + 1, head // heads_per_kv_head].astype(
            np.float64
        )
        scores = keys @ q[head].astype(np.float64) * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        sink_scores = [] if sinks is None else [float(sinks[head])]
        weights = np.exp(np.array([*scores, *sink_scores]) - max([*scores, *sink_scores]))
        attended[head] = weights[: len(scores)] @ values / weights.sum()
    return attended


@pytest.mark.parametrize("head_counts", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 40])
@pytest.mark.parametrize(("soft_cap", "has_sinks"), [(None, False), (3.0, False), (None, True), (2.0, True)])
def test_attention_equals_numpy(
    head_counts: tuple[int, int], window: int | None, soft_cap: float | None, has_sinks: bool
) -> None:
    num_heads, num_kv_heads = head_counts
    lengths, row_counts = [1, 50, 33, 64], [1, 50, 2, 17]
    kv, sequences = paged_cache(lengths, num_kv_heads, 8, window=window)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(row_counts), num_heads, 8, generator=generator)
    sinks = torch.randn(num_heads, generator=generator) if has_sinks else None
    row_offsets = torch.tensor([0, *np.cumsum(row_counts)], dtype=torch.int32)
    attended = OPS.attention(
        q,
        kv,
        row_offsets,
        torch.tensor(lengths, dtype=torch.int32),
        scale=0.4,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    row = 0
    for length, count, keys_and_values in zip(lengths, row_counts, sequences, strict=True):
        for position in range(length - count, length):
            expected = numpy_attention(
                q[row].numpy(),
                keys_and_values,
                position,
                0.4,
                window,
                soft_cap,
                None if sinks is None else sinks.numpy(),
            )
            np.testing.assert_allclose(attended[row].numpy(), expected, atol=2e-6)
            row += 1


@pytest.mark.parametrize("chunk", [1, 7, 16, 40])
def test_chunked_attention_equals_numpy(chunk: int) -> None:
    kv, (keys_and_values,) = paged_cache([50], 2, 8, window=chunk, is_chunked=True)
    q = torch.randn(45, 4, 8, generator=torch.Generator().manual_seed(0))
    row_offsets, lengths = torch.tensor([0, 45], dtype=torch.int32), torch.tensor([50], dtype=torch.int32)
    attended = OPS.attention(q, kv, row_offsets, lengths, scale=0.4)
    for row in range(45):
        expected = numpy_attention(
            q[row].numpy(), keys_and_values, row + 5, 0.4, chunk, None, None, is_chunked=True
        )
        np.testing.assert_allclose(attended[row].numpy(), expected, atol=2e-6)


def test_blocks_before_the_window_are_not_read() -> None:
    kv, _ = paged_cache([60], 2, 8, window=20)
    q = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    row_offsets, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([60], dtype=torch.int32)
    result_before = OPS.attention(q, kv, row_offsets, lengths, scale=0.3)
    kv.cache[:, 0] = 0.0  # the null block may have any finite content
    kv.block_tables[0, :2] = 0
    assert torch.equal(OPS.attention(q, kv, row_offsets, lengths, scale=0.3), result_before)


def test_attention_over_an_int8_cache_is_close_to_exact_attention() -> None:
    exact_kv, sequences = paged_cache([70], 2, 16)
    rounded_kv, _ = paged_cache([70], 2, 16, is_int8=True)
    assert rounded_kv.cache.dtype is torch.int8
    q = torch.randn(5, 4, 16, generator=torch.Generator().manual_seed(0))
    row_offsets, lengths = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([70], dtype=torch.int32)
    difference = OPS.attention(q, rounded_kv, row_offsets, lengths, scale=0.3) - OPS.attention(
        q, exact_kv, row_offsets, lengths, scale=0.3
    )
    assert 0 < float(difference.abs().max()) < 0.03
    assert sequences[0].shape == (2, 70, 2, 16)


@pytest.mark.parametrize("fixed_scale", [None, 4 / 448])
def test_attention_over_an_fp8_cache_is_close_to_exact_attention(fixed_scale: float | None) -> None:
    """The error of a stored number is at most 2**-4 of its magnitude or 2**-10 of its scale (the larger)."""
    exact_kv, _ = paged_cache([70], 2, 16)
    rounded_kv, _ = paged_cache([70], 2, 16, is_fp8=True, fixed_scale=fixed_scale)
    assert rounded_kv.scales is not None
    scales = rounded_kv.scales[..., None]
    is_written = exact_kv.cache.isfinite()
    values, result = exact_kv.cache[is_written], (rounded_kv.cache.float() * scales)[is_written]
    bound = torch.maximum(values.abs() * 2**-4, 2**-10 * scales.expand(is_written.shape)[is_written])
    differences = (values - result).abs()
    assert (differences <= bound * 1.0001)[values.abs() < 4].all()
    assert 0.5 < float((differences / bound).max())
    q = torch.randn(5, 4, 16, generator=torch.Generator().manual_seed(0))
    row_offsets, lengths = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([70], dtype=torch.int32)
    actual, expected = (
        OPS.attention(q, kv, row_offsets, lengths, scale=0.3) for kv in (rounded_kv, exact_kv)
    )
    assert 0 < float((actual - expected).abs().max()) < 0.06


def test_values_beyond_448_times_a_fixed_scale_are_clipped() -> None:
    exact_kv, _ = paged_cache([70], 2, 16)
    rounded_kv, _ = paged_cache([70], 2, 16, is_fp8=True, fixed_scale=1 / 448)
    is_written = exact_kv.cache.isfinite()
    result = (rounded_kv.cache.float() / 448)[is_written]
    assert float(result.max()) == 1
    assert float(result.min()) == -1
    assert (result[exact_kv.cache[is_written] > 1] == 1).all()


def test_rms_norms_equal_numpy() -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 5, 12, generator=generator)
    weight = torch.randn(12, generator=generator)
    normalized, total = OPS.add_rms_norm(x, residual, weight, 1e-3)
    float64_sum = (x + residual).numpy().astype(np.float64)
    expected = float64_sum / np.sqrt((float64_sum**2).mean(-1, keepdims=True) + 1e-3) * weight.numpy()
    np.testing.assert_allclose(normalized.numpy(), expected, atol=1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(OPS.rms_norm(total, weight, 1e-3), normalized)


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("silu", torch.nn.functional.silu),
        ("gelu", torch.nn.functional.gelu),
        ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        ("relu", torch.relu),
    ],
)
def test_gated_activations_equal_torch(activation: str, function: object) -> None:
    x = torch.randn(7, 22, generator=torch.Generator().manual_seed(0))
    expected = function(x[:, :11]) * x[:, 11:]  # type: ignore[operator]
    torch.testing.assert_close(OPS.gated_activation(x, activation), expected)  # type: ignore[arg-type]


def test_rotary_rotates_pairs_and_keeps_the_other_dimensions() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(3, 2, 10, generator=generator), torch.randn(3, 1, 10, generator=generator)
    angles = torch.randn(3, 4, generator=generator)
    for heads, rotated in zip((q, k), OPS.rotary(q, k, angles.cos(), angles.sin()), strict=True):
        assert torch.equal(rotated[..., 8:], heads[..., 8:])
        rotated_pairs = torch.complex(heads[..., :4], heads[..., 4:8]) * torch.exp(1j * angles)[:, None]
        torch.testing.assert_close(rotated[..., :4], rotated_pairs.real)
        torch.testing.assert_close(rotated[..., 4:8], rotated_pairs.imag)


@pytest.mark.parametrize("num_rows", [1, 5, 8, 20])
def test_linear_with_bias_and_adapters_equals_torch(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight, bias = torch.randn(9, 6, generator=generator), torch.randn(9, generator=generator)
    packed_weight = pack_linear(
        weight, "float32", bias=bias, slices=[LinearSlice("first", 0, 4), LinearSlice("second", 4, 9)]
    )
    x = torch.randn(num_rows, 6, generator=generator)
    torch.testing.assert_close(OPS.linear(x, packed_weight), x @ weight.T + bias)
    down, up = torch.randn(2, 3, 6, generator=generator), torch.randn(2, 5, 3, generator=generator)
    adapters = torch.tensor([-1, 1, 0, 1, -1] * 4)[:num_rows]
    adapted_result = OPS.linear(x, packed_weight, lora=LoRAInputs(adapters, {"second": (down, up)}))
    expected = x @ weight.T + bias
    for row, adapter in enumerate(adapters.tolist()):
        if adapter >= 0:
            expected[row, 4:] += up[adapter] @ (down[adapter] @ x[row])
    torch.testing.assert_close(adapted_result, expected, atol=1e-5, rtol=1e-5)


def test_take_rows_and_put_rows_copy_rows() -> None:
    x = torch.arange(12.0).view(4, 3)
    assert OPS.take_rows(x, torch.tensor([3, 0])).tolist() == [[9, 10, 11], [0, 1, 2]]
    result = OPS.put_rows(x, torch.tensor([1]), torch.zeros(1, 3))
    assert result.tolist() == [[0, 1, 2], [0, 0, 0], [6, 7, 8], [9, 10, 11]]
    assert x[1].tolist() == [3, 4, 5], "put_rows does not change its input"


def test_a_negative_token_id_is_refused() -> None:
    with pytest.raises(IndexError):
        OPS.embedding(torch.tensor([1, -2]), torch.zeros(4, 3))


def test_a_nan_logit_is_routed_after_all_numbers() -> None:
    logits = torch.full((1, 9), torch.nan)
    logits[0, 1], logits[0, 5] = 1, -20.0
    for routing in ("all", "all_normed", "chosen"):
        _, topk_ids = OPS.route(logits, 4, routing)
        assert topk_ids[0, :2].tolist() == [1, 5]
        assert len(set(topk_ids[0].tolist())) == 4
