"""Operations of audio codecs: every back end agrees with torch, or with the definition of the operation."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.back_ends import all_back_ends, back_end_params
from torch import Tensor

from penstock.kernels import Ops
from penstock.kernels.convolution import inverse_dft_weight
from penstock.kernels.reference import ReferenceOps

REFERENCE = ReferenceOps()
BACK_ENDS = all_back_ends()
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6}
LENGTHS = [9, 1, 30]

CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "pointwise": {"shape": (20, 12, 1)},
    "wide": {"shape": (70, 5, 7), "padding": 3},
    "strided": {"shape": (6, 4, 8), "stride": 4, "padding": 2},
    "dilated": {"shape": (9, 8, 3), "dilation": 2, "padding": 2},
    "depthwise": {"shape": (37, 1, 7), "groups": 37, "padding": 3},
    "depthwise dilated": {"shape": (64, 1, 7), "groups": 64, "padding": 27, "dilation": 9},
    "depthwise strided": {"shape": (16, 1, 4), "groups": 16, "padding": 1, "stride": 2},
    "grouped": {"shape": (8, 2, 5), "groups": 4, "padding": 2},
    "no padding": {"shape": (6, 4, 3)},
}
TRANSPOSED_CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "doubling": {"shape": (12, 10, 4), "stride": 2, "padding": 1},
    "by eight": {"shape": (16, 6, 16), "stride": 8, "padding": 4},
    "by three": {"shape": (5, 7, 6), "stride": 3, "padding": 2, "output_padding": 1},
    "uneven": {"shape": (5, 7, 7), "stride": 3, "output_padding": 2},
    "short kernel": {"shape": (4, 3, 2), "stride": 5},
    "grouped": {"shape": (8, 3, 4), "stride": 2, "groups": 4, "padding": 1},
    "dilated": {"shape": (4, 3, 3), "stride": 2, "dilation": 2},
}


@pytest.fixture(params=back_end_params(BACK_ENDS))
def ops(request: pytest.FixtureRequest) -> Ops:
    torch.manual_seed(0)
    return BACK_ENDS[request.param]


@pytest.fixture(params=back_end_params(BACK_ENDS))
def deterministic_ops(request: pytest.FixtureRequest) -> Ops:
    torch.manual_seed(0)
    return all_back_ends(deterministic=True)[request.param]


def make_row_offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def random_sequences(channels: int, dtype: torch.dtype, lengths: list[int]) -> tuple[Tensor, Tensor]:
    return torch.randn(sum(lengths), channels).to(dtype), make_row_offsets(lengths)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * scale)


def transposed_rows(x: Tensor, start: int, stop: int) -> Tensor:
    return x[start:stop].float().t()[None]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_conv1d_equals_torch(ops: Ops, name: str, dtype: torch.dtype, has_bias: bool) -> None:
    fields = dict(CONVOLUTIONS[name])
    weight = torch.randn(fields.pop("shape")).to(dtype)
    bias = torch.randn(len(weight)).to(dtype) if has_bias else None
    encoding = "float32" if dtype == torch.float32 else "bfloat16"
    packed_weight = ops.pack_conv1d(weight, encoding, bias=bias, **fields)
    lengths = [length for length in LENGTHS if packed_weight.output_length(length)]
    x, row_offsets = random_sequences(packed_weight.in_channels, dtype, lengths)
    float_bias = None if bias is None else bias.float()
    expected = [
        F.conv1d(transposed_rows(x, start, stop), weight.float(), float_bias, **fields)[0].t()
        for start, stop in pairwise(row_offsets)
    ]
    assert [len(reference) for reference in expected] == [
        packed_weight.output_length(length) for length in lengths
    ]
    assert_close(ops.conv1d(x, packed_weight, row_offsets), torch.cat(expected).to(dtype), dtype)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", TRANSPOSED_CONVOLUTIONS)
def test_conv_transpose1d_equals_torch(ops: Ops, name: str, dtype: torch.dtype, has_bias: bool) -> None:
    fields = dict(TRANSPOSED_CONVOLUTIONS[name])
    weight = torch.randn(fields.pop("shape")).to(dtype)
    channels = weight.shape[1] * fields.get("groups", 1)
    bias = torch.randn(channels).to(dtype) if has_bias else None
    encoding = "float32" if dtype == torch.float32 else "bfloat16"
    packed_weight = ops.pack_conv_transpose1d(weight, encoding, bias=bias, **fields)
    x, row_offsets = random_sequences(packed_weight.in_channels, dtype, LENGTHS)
    float_bias = None if bias is None else bias.float()
    expected = [
        F.conv_transpose1d(transposed_rows(x, start, stop), weight.float(), float_bias, **fields)[0].t()
        for start, stop in pairwise(row_offsets)
    ]
    assert [len(reference) for reference in expected] == [
        packed_weight.output_length(length) for length in LENGTHS
    ]
    assert_close(ops.conv_transpose1d(x, packed_weight, row_offsets), torch.cat(expected).to(dtype), dtype)


@pytest.mark.parametrize("name", ["wide", "depthwise dilated", "strided"])
def test_conv1d_of_a_sequence_is_bit_equal_alone_and_in_a_batch(deterministic_ops: Ops, name: str) -> None:
    fields = dict(CONVOLUTIONS[name])
    packed_weight = deterministic_ops.pack_conv1d(torch.randn(fields.pop("shape")), "float32", **fields)
    lengths = [100, 9, 41]
    x, row_offsets = random_sequences(packed_weight.in_channels, torch.float32, lengths)
    single_results = [
        deterministic_ops.conv1d(x[start:stop], packed_weight, make_row_offsets([int(stop - start)]))
        for start, stop in pairwise(row_offsets)
    ]
    assert torch.equal(deterministic_ops.conv1d(x, packed_weight, row_offsets), torch.cat(single_results))


@pytest.mark.parametrize("name", ["wide", "depthwise", "strided", "grouped"])
def test_sequences_shorter_than_the_kernel_give_no_rows(ops: Ops, name: str) -> None:
    fields = {**CONVOLUTIONS[name], "padding": 0}
    packed_weight = ops.pack_conv1d(torch.randn(fields.pop("shape")), "float32", **fields)
    y = ops.conv1d(torch.randn(1, packed_weight.in_channels), packed_weight, make_row_offsets([1]))
    assert y.shape == (0, packed_weight.out_channels)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 8), (5, 37), (70, 64)])
def test_snake_equals_its_definition(ops: Ops, dtype: torch.dtype, num_rows: int, width: int) -> None:
    x = (3 * torch.randn(num_rows, 2 * width)).to(dtype)[:, :width]  # the rows are strided
    alpha, beta = torch.randn(width) * 5, torch.randn(width)
    x64 = x.double()
    expected = x64 + beta.double() * (alpha.double() * x64).sin() ** 2
    assert_close(ops.snake(x, alpha, beta), expected.to(dtype), dtype)
    large_x = 100 * torch.randn(num_rows, width)
    exact_result = large_x.double() + beta.double() * (alpha.double() * large_x.double()).sin() ** 2
    torch.testing.assert_close(ops.snake(large_x, alpha, beta).double(), exact_result, rtol=1e-6, atol=2e-4)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_add_scaled_equals_its_definition(ops: Ops, dtype: torch.dtype) -> None:
    x, y = torch.randn(2, 33, 100).to(dtype)[:, :, :50]
    factors = torch.randn(33)
    expected = (x.float() + factors[:, None] * y.float()).to(dtype)
    assert_close(ops.add_scaled(x, y, factors), expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("width", "num_groups"), [(64, 32), (60, 3), (128, 2)])
def test_group_norm_equals_torch(ops: Ops, dtype: torch.dtype, width: int, num_groups: int) -> None:
    x, row_offsets = random_sequences(width, dtype, LENGTHS)
    x = (3 + 2 * x).to(dtype)
    weight, bias = torch.randn(2, width)
    expected = [
        torch.group_norm(
            transposed_rows(x, start, stop).double(), num_groups, weight.double(), bias.double(), 1e-6
        )[0].t()
        for start, stop in pairwise(row_offsets)
    ]
    actual = ops.group_norm(x, weight, bias, num_groups, 1e-6, row_offsets)
    assert_close(actual, torch.cat(expected).to(dtype), dtype)


def test_group_norm_of_groups_of_one_number_is_the_bias(ops: Ops) -> None:
    x, weight, bias = torch.randn(3, 1, 32)
    actual = ops.group_norm(x, weight[0], bias[0], 32, 1e-6, make_row_offsets([1]))
    torch.testing.assert_close(actual, bias, rtol=0, atol=1e-3)


def test_the_inverse_short_time_fourier_transform_equals_torch(ops: Ops) -> None:
    window_size, hop, lengths = 48, 12, [7, 1, 4]
    x, row_offsets = random_sequences(window_size + 2, torch.float32, lengths)
    x = x * 5
    window = torch.hann_window(window_size)
    packed_weight = ops.pack_linear(inverse_dft_weight(window), "float32")
    polar_values = ops.polar(x, 30.0)
    assert_close(polar_values, REFERENCE.polar(x, 30.0), torch.float32)
    spectra = x[:, : window_size // 2 + 1].double().exp().clamp(max=30.0)
    spectra = torch.polar(spectra, x[:, window_size // 2 + 1 :].double())
    samples = ops.overlap_add(ops.linear(polar_values, packed_weight), window.square(), hop, row_offsets)
    expected = []
    for start, stop in pairwise(row_offsets.tolist()):
        frames = torch.fft.irfft(spectra[start:stop], n=window_size) * window.double()
        total, square_sums = torch.zeros(2, (stop - start - 1) * hop + window_size, dtype=torch.float64)
        for frame_index, frame in enumerate(frames):
            total[frame_index * hop : frame_index * hop + window_size] += frame
            square_sums[frame_index * hop : frame_index * hop + window_size] += window.double() ** 2
        num_dropped_samples = (window_size - hop) // 2
        expected.append(
            (total / square_sums)[num_dropped_samples : num_dropped_samples + (stop - start) * hop]
        )
    assert_close(samples, torch.cat(expected).float(), torch.float32)
    assert_close(
        samples,
        REFERENCE.overlap_add(ops.linear(polar_values, packed_weight), window.square(), hop, row_offsets),
        torch.float32,
    )
