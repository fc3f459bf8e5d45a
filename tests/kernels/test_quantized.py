"""int8, int5 and int4: the definition of quantization and products, compared with scalar arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels import encoding_named, pack_linear
from penstock.kernels.quantized import INPUTS_PER_EXTRA, MAX_EXTRAS, quantize, quantize_activations
from penstock.kernels.reference import ReferenceOps

ENCODINGS = ["int8", "int5", "int4"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_the_scale_of_a_row_is_its_largest_magnitude_divided_by_127() -> None:
    x = torch.tensor([[0.5, -127.0, 63.5, 62.5], [0.0, 0.0, 0.0, 0.0], [1e-31, 0.0, 0.0, -1e-32]])
    integers, scales = quantize(x)
    # halves are rounded to the even integer
    assert integers.tolist() == [[0, -127, 64, 62], [0] * 4, [0] * 4]
    assert scales.tolist() == [1.0, 0.0, 0.0]


def test_the_largest_floats_are_quantized() -> None:
    integers, scales = quantize(torch.tensor([[3.4e38, -1.7e38]]))
    assert integers.tolist() == [[127, -64]]
    torch.testing.assert_close(scales, torch.tensor([3.4e38 / 127]))


def test_outliers_use_extra_bytes() -> None:
    x = torch.full((4, 64), 1.0)
    x[0, 3] = -8.0  # two extra bytes are available, so the largest value can be 3 * 127
    x[1, 3] = -3.0
    x[2, :2], x[3, :3] = 2.0, 2.0
    integers, scales = quantize_activations(x)
    assert [sorted(set(row)) for row in integers.tolist()] == [[-381, 48], [-381, 127], [127, 254], [64, 127]]
    torch.testing.assert_close(scales, torch.tensor([8 / 381, 3 / 381, 2 / 254, 2 / 127]))


@given(
    st.integers(1, 700).flatmap(
        lambda num_inputs: st.tuples(
            st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20),
            st.integers(0, 2**31),
            st.just(num_inputs),
        )
    )
)
def test_outliers_of_random_activations_fit_into_the_extra_bytes(
    activations_and_size: tuple[list[float], int, int],
) -> None:
    large_values, seed, inputs = activations_and_size
    x = torch.randn(1, inputs, generator=torch.Generator().manual_seed(seed))
    x[0, : len(large_values)] = torch.tensor(large_values)[:inputs]
    integers, scales = quantize_activations(x)
    _, plain_scales = quantize(x)
    max_extras = min(MAX_EXTRAS, inputs // INPUTS_PER_EXTRA)

    def num_extras(quantized_row: Tensor) -> int:
        return sum(max(math.ceil(abs(value) / 127) - 1, 0) for value in quantized_row[0].tolist())

    assert num_extras(integers) <= max_extras
    largest_error = float((x - integers * scales[:, None]).abs().max())
    assert largest_error <= float(scales) * 0.5001 + 1e-30  # a row of magnitudes below 1e-30 becomes 0
    assert 1 <= float(plain_scales) / max(float(scales), 1e-38) <= 16.001 or float(plain_scales) == 0
    # If the ratio of the scales is below 11, the next smaller scale is at least two thirds of this scale.
    if 0 < float(plain_scales) / max(float(scales), 1e-38) < 11:
        assert num_extras((x / (scales[:, None] * 0.66)).round()) > max_extras


@pytest.mark.parametrize("invalid_value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_only_a_row_with_a_non_finite_value_gives_nan(encoding: str, invalid_value: float) -> None:
    packed_weight = pack_linear(torch.randn(70, 100), encoding)
    x = torch.randn(5, 100)
    plain_result = ReferenceOps().linear(x, packed_weight)
    x[3, 40] = invalid_value
    y = ReferenceOps().linear(x, packed_weight)
    assert y[3].isnan().all()
    assert torch.equal(y[[0, 1, 2, 4]], plain_result[[0, 1, 2, 4]])


@pytest.mark.parametrize("invalid_value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_non_finite_weight_gives_nan_in_its_output(encoding: str, invalid_value: float) -> None:
    weight = torch.randn(70, 100)
    weight[7, 99] = invalid_value
    y = ReferenceOps().linear(torch.randn(3, 100), pack_linear(weight, encoding))
    assert y[:, 7].isnan().all()
    assert y[:, :7].isfinite().all()
    assert y[:, 8:].isfinite().all()


@pytest.mark.parametrize(("encoding", "max_error"), [("int8", 0.01), ("int5", 0.042), ("int4", 0.085)])
@pytest.mark.parametrize("in_features", [96, 100])
def test_errors_are_within_bounds_and_rows_have_the_same_bits_alone_and_in_bfloat16(
    encoding: str, max_error: float, in_features: int
) -> None:
    weight, x, bias = torch.randn(300, in_features), torch.randn(40, in_features), torch.randn(300)
    packed_weight = pack_linear(weight, encoding, bias=bias)
    stored_weight = encoding_named(encoding).unpack(packed_weight.tensors)
    assert float((stored_weight - weight).norm() / weight.norm()) < max_error
    assert packed_weight.bias is not None
    expected = x @ stored_weight.T + packed_weight.bias.float()
    y = ReferenceOps().linear(x, packed_weight)
    assert float((y - expected).norm() / expected.norm()) < 0.01
    assert torch.equal(ReferenceOps().linear(x[3:4], packed_weight), y[3:4])
    rounded_result = ReferenceOps().linear(x.bfloat16().float(), packed_weight).bfloat16()
    assert torch.equal(ReferenceOps().linear(x.bfloat16(), packed_weight), rounded_result)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_packing_unpacked_weights_changes_nothing(encoding: str) -> None:
    linear_encoding = encoding_named(encoding)
    first_packing = linear_encoding.pack(torch.randn(50, 70))
    second_packing = linear_encoding.pack(linear_encoding.unpack(first_packing))
    assert torch.equal(linear_encoding.unpack(first_packing), linear_encoding.unpack(second_packing))


def quantize_group(weight: np.ndarray, bits: int) -> tuple[list[int], float]:
    """Return the integers and the scale of one group, computed by scalar float32 arithmetic."""
    f32 = np.float32
    min_integer, max_integer = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    largest_weight = weight[int(np.argmax(np.abs(weight)))]
    best_fit, best_scale = f32(-1), f32(0)
    for i in range(7):
        divisor = -f32((7 + i / 3) * (2 if bits == 5 else 1))
        inverse = f32(0) if abs(largest_weight) < 1e-30 else divisor / largest_weight
        product = square = f32(0)
        for number in weight:
            x = number * inverse
            integer = f32(np.rint(np.clip(x, min_integer, max_integer)))
            product += x * integer
            square += integer * integer
        if square == 0:
            return [0] * 32, 0.0
        projection = product / divisor
        if projection * projection / square > best_fit:
            best_fit = projection * projection / square
            best_scale = product / square * (largest_weight / divisor)
    scale = f32(np.float16(np.clip(best_scale, -65504, 65504))) + f32(0)
    inverse = f32(0) if scale == 0 else f32(1) / scale
    return [int(np.rint(np.clip(number * inverse, min_integer, max_integer))) for number in weight], float(
        scale
    )


FLOATS = (
    st.floats(-70000, 70000, width=32)
    | st.floats(-(2**-20), 2**-20, width=32)
    | st.integers(-9, 9).map(float)
)


@pytest.mark.parametrize("bits", [4, 5])
@given(st.lists(FLOATS, min_size=32, max_size=32))
def test_integers_and_scale_of_a_group_equal_scalar_arithmetic(bits: int, values: list[float]) -> None:
    tensors = encoding_named(f"int{bits}").pack(torch.tensor([values]))
    integers, scale = quantize_group(np.array(values, np.float32), bits)
    assert tensors["weight"].tolist() == [integers]
    assert tensors["scales"].tolist() == [[scale]]


def test_sums_of_extreme_values_are_exact() -> None:
    in_features = 14336
    weight = torch.full((2, in_features), 127.0)
    weight[1] = -127
    y = ReferenceOps().linear(torch.full((1, in_features), 127.0), pack_linear(weight, "int8"))
    assert y.tolist() == [
        [float(np.float32(127 * 127 * in_features)), -float(np.float32(127 * 127 * in_features))]
    ]


@pytest.mark.parametrize(
    ("encoding", "shape", "size"),
    [
        ("int8", (64, 100), 6400 + 256),
        ("int8", (65, 98), 12800 + 260),
        ("int4", (65, 33), 2 * 2 * 1152),
        ("int5", (65, 33), 2 * 2 * 1408),
    ],
)
def test_sizes_are_those_of_whole_panels(encoding: str, shape: tuple[int, int], size: int) -> None:
    assert encoding_named(encoding).num_bytes(*shape) == size


def test_a_packed_row_does_not_depend_on_other_rows() -> None:
    weight = torch.randn(1100, 40)
    full_rows = encoding_named("int4").pack(weight)
    single_rows: list[dict[str, Tensor]] = [
        encoding_named("int4").pack(row[None]) for row in weight[[0, 511, 512, 1099]]
    ]
    assert torch.equal(
        full_rows["weight"][[0, 511, 512, 1099]],
        torch.cat([packed_row["weight"] for packed_row in single_rows]),
    )
    assert torch.equal(
        full_rows["scales"][[0, 511, 512, 1099]],
        torch.cat([packed_row["scales"] for packed_row in single_rows]),
    )


def test_importance_of_inputs_reduces_the_weighted_error() -> None:
    weight, importance = torch.randn(200, 96), torch.randn(96).mul(2).exp()
    encoding = encoding_named("int4")

    def error(*importance_of_inputs: Tensor) -> float:
        return float(
            (
                (encoding.unpack(encoding.pack(weight, *importance_of_inputs)) - weight).square() * importance
            ).sum()
        )

    assert error(importance) < 0.8 * error()
    assert error(importance * 1000) == pytest.approx(error(importance), rel=1e-3), (
        "only the ratios of the importance count"
    )
    assert error(torch.ones(96)) == error()
