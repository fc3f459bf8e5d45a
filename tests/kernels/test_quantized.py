"""Weights in 8, 5 and 4 bits: the definition, compared with arithmetic number by number."""

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


def test_a_row_is_measured_by_its_largest() -> None:
    x = torch.tensor([[0.5, -127.0, 63.5, 62.5], [0.0, 0.0, 0.0, 0.0], [1e-31, 0.0, 0.0, -1e-32]])
    integers, scales = quantize(x)
    assert integers.tolist() == [[0, -127, 64, 62], [0] * 4, [0] * 4]  # halves go to the even integer
    assert scales.tolist() == [1.0, 0.0, 0.0]


def test_the_largest_float() -> None:
    integers, scales = quantize(torch.tensor([[3.4e38, -1.7e38]]))
    assert integers.tolist() == [[127, -64]]
    torch.testing.assert_close(scales, torch.tensor([3.4e38 / 127]))


def test_a_few_activations_may_be_large() -> None:
    x = torch.full((4, 64), 1.0)
    x[0, 3] = -8.0  # two additional bytes are available, so the largest value can be 3 x 127
    x[1, 3] = -3.0
    x[2, :2], x[3, :3] = 2.0, 2.0
    integers, scales = quantize_activations(x)
    assert [sorted(set(row)) for row in integers.tolist()] == [[-381, 48], [-381, 127], [127, 254], [64, 127]]
    torch.testing.assert_close(scales, torch.tensor([8 / 381, 3 / 381, 2 / 254, 2 / 127]))


@given(
    st.integers(1, 700).flatmap(
        lambda n: st.tuples(
            st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20),
            st.integers(0, 2**31),
            st.just(n),
        )
    )
)
def test_activations_need_few_extra_bytes(drawn: tuple[list[float], int, int]) -> None:
    large, seed, inputs = drawn
    x = torch.randn(1, inputs, generator=torch.Generator().manual_seed(seed))
    x[0, : len(large)] = torch.tensor(large)[:inputs]
    integers, scales = quantize_activations(x)
    _, plain = quantize(x)
    room = min(MAX_EXTRAS, inputs // INPUTS_PER_EXTRA)

    def num_extras(wholes: Tensor) -> int:
        return sum(max(math.ceil(abs(whole) / 127) - 1, 0) for whole in wholes[0].tolist())

    assert num_extras(integers) <= room
    farthest = float((x - integers * scales[:, None]).abs().max())
    assert farthest <= float(scales) * 0.5001 + 1e-30  # a smaller row is rounded to 0
    assert 1 <= float(plain) / max(float(scales), 1e-38) <= 16.001 or float(plain) == 0
    if (
        0 < float(plain) / max(float(scales), 1e-38) < 11
    ):  # the next smaller scale is at least two thirds of this one
        assert num_extras((x / (scales[:, None] * 0.66)).round()) > room


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_only_a_row_that_is_not_finite_gives_nan(encoding: str, bad: float) -> None:
    packed = pack_linear(torch.randn(70, 100), encoding)
    x = torch.randn(5, 100)
    plain = ReferenceOps().linear(x, packed)
    x[3, 40] = bad
    y = ReferenceOps().linear(x, packed)
    assert y[3].isnan().all()
    assert torch.equal(y[[0, 1, 2, 4]], plain[[0, 1, 2, 4]])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_weights_that_are_not_finite_give_nan_in_their_output(encoding: str, bad: float) -> None:
    weight = torch.randn(70, 100)
    weight[7, 99] = bad
    y = ReferenceOps().linear(torch.randn(3, 100), pack_linear(weight, encoding))
    assert y[:, 7].isnan().all()
    assert y[:, :7].isfinite().all()
    assert y[:, 8:].isfinite().all()


@pytest.mark.parametrize(("encoding", "error"), [("int8", 0.01), ("int5", 0.042), ("int4", 0.085)])
@pytest.mark.parametrize("in_features", [96, 100])
def test_how_close_the_weights_and_the_products_are(encoding: str, error: float, in_features: int) -> None:
    weight, x, bias = torch.randn(300, in_features), torch.randn(40, in_features), torch.randn(300)
    packed = pack_linear(weight, encoding, bias=bias)
    stored = encoding_named(encoding).unpack(packed.tensors)
    assert float((stored - weight).norm() / weight.norm()) < error
    assert packed.bias is not None
    expected = x @ stored.T + packed.bias.float()
    y = ReferenceOps().linear(x, packed)
    assert float((y - expected).norm() / expected.norm()) < 0.01
    assert torch.equal(ReferenceOps().linear(x[3:4], packed), y[3:4])
    rounded = ReferenceOps().linear(x.bfloat16().float(), packed).bfloat16()
    assert torch.equal(ReferenceOps().linear(x.bfloat16(), packed), rounded)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_packing_what_was_packed_changes_nothing(encoding: str) -> None:
    kind = encoding_named(encoding)
    once = kind.pack(torch.randn(50, 70))
    again = kind.pack(kind.unpack(once))
    assert torch.equal(kind.unpack(once), kind.unpack(again))


def quantized_by_number(weight: np.ndarray, bits: int) -> tuple[list[int], float]:
    """Return the integers and the scale of one group, computed number by number."""
    one = np.float32
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    largest = weight[int(np.argmax(np.abs(weight)))]
    best, best_scale = one(-1), one(0)
    for i in range(7):
        divisor = -one((7 + i / 3) * (2 if bits == 5 else 1))
        inverse = one(0) if abs(largest) < 1e-30 else divisor / largest
        product = square = one(0)
        for w in weight:
            x = w * inverse
            integer = one(np.rint(np.clip(x, low, high)))
            product += x * integer
            square += integer * integer
        if square == 0:
            return [0] * 32, 0.0
        in_weights = product / divisor
        if in_weights * in_weights / square > best:
            best = in_weights * in_weights / square
            best_scale = product / square * (largest / divisor)
    scale = one(np.float16(np.clip(best_scale, -65504, 65504))) + one(0)
    inverse = one(0) if scale == 0 else one(1) / scale
    return [int(np.rint(np.clip(w * inverse, low, high))) for w in weight], float(scale)


FLOATS = (
    st.floats(-70000, 70000, width=32)
    | st.floats(-(2**-20), 2**-20, width=32)
    | st.integers(-9, 9).map(float)
)


@pytest.mark.parametrize("bits", [4, 5])
@given(st.lists(FLOATS, min_size=32, max_size=32))
def test_the_scale_of_a_group_is_the_one_that_fits_best(bits: int, values: list[float]) -> None:
    tensors = encoding_named(f"int{bits}").pack(torch.tensor([values]))
    integers, scale = quantized_by_number(np.array(values, np.float32), bits)
    assert tensors["weight"].tolist() == [integers]
    assert tensors["scales"].tolist() == [[scale]]


def test_sums_are_exact_at_the_extremes() -> None:
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


def test_scales_are_searched_for_rows_at_a_time() -> None:
    weight = torch.randn(1100, 40)
    together = encoding_named("int4").pack(weight)
    apart: list[dict[str, Tensor]] = [
        encoding_named("int4").pack(row[None]) for row in weight[[0, 511, 512, 1099]]
    ]
    assert torch.equal(together["weight"][[0, 511, 512, 1099]], torch.cat([one["weight"] for one in apart]))
    assert torch.equal(together["scales"][[0, 511, 512, 1099]], torch.cat([one["scales"] for one in apart]))


def test_errors_of_inputs_that_matter_are_smaller() -> None:
    weight, importance = torch.randn(200, 96), torch.randn(96).mul(2).exp()
    kind = encoding_named("int4")

    def error(*of: Tensor) -> float:
        return float(((kind.unpack(kind.pack(weight, *of)) - weight).square() * importance).sum())

    assert error(importance) < 0.8 * error()
    assert error(importance * 1000) == pytest.approx(error(importance), rel=1e-3), (
        "the measure does not count"
    )
    assert error(torch.ones(96)) == error()
