"""Linear layers in int8, int5 and int4 agree with the definition on every instruction set."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from penstock.kernels import PackedLinear, encoding_named
from penstock.kernels.cpu import variants
from penstock.kernels.cpu.linear import PANELS
from penstock.kernels.cpu.ops import CpuOps

VARIANTS = {ops.isa: ops for ops in variants()}
SHAPES = [(64, 64), (70, 33), (1, 1), (130, 100), (200, 4100), (65, 2), (129, 3000)]
"""Numbers of outputs and inputs (K).

They cover whole and partial panels, K that is no multiple of 2, 4 or 32, and several blocks of K.
"""


@pytest.fixture(params=VARIANTS or [pytest.param("none", marks=pytest.mark.skip("no kernels are built"))])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    torch.manual_seed(0)
    return VARIANTS[request.param]


@pytest.fixture(params=["int8", "int5", "int4"])
def encoding(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def pack_with_bias(ops: CpuOps, weight: Tensor, encoding: str, bias: Tensor | None = None) -> PackedLinear:
    packed_weight = ops.pack_linear(weight, encoding)
    assert packed_weight.layout == PANELS
    return PackedLinear(
        encoding,
        packed_weight.tensors,
        packed_weight.in_features,
        packed_weight.out_features,
        bias,
        (),
        packed_weight.layout,
    )


def expected_product(weight: Tensor, encoding: str, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the encoding's product in float32, and the sum of the magnitudes of its terms."""
    linear_encoding = encoding_named(encoding)
    tensors = linear_encoding.pack(weight)
    float_bias = None if bias is None else bias.float()
    y = linear_encoding.multiply(x.float(), tensors, float_bias)
    magnitude_sums = x.float().abs() @ linear_encoding.unpack(tensors).abs().T
    return y, magnitude_sums if float_bias is None else magnitude_sums + float_bias.abs()


def assert_is_rounded(y: Tensor, expected: Tensor, magnitude_sums: Tensor) -> None:
    """Check that ``y`` equals ``expected`` up to a few float32 roundings and one to the type of ``y``."""
    rounding = 0.0 if y.dtype == torch.float32 else 2**-8
    assert bool(((y.float() - expected).abs() <= rounding * expected.abs() + 2**-21 * magnitude_sums).all())


@pytest.mark.matrix
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_agree_with_the_definition(
    ops: CpuOps, encoding: str, dtype: torch.dtype, shape: tuple[int, int], has_bias: bool
) -> None:
    weight = torch.randn(shape)
    # the rows are strided and unaligned
    x = torch.randn(33, shape[1] + 5).to(dtype)[:, 3 : 3 + shape[1]]
    x[5, 0] = 10000.0
    x[7] = 0
    bias = torch.randn(shape[0]).to(dtype) if has_bias else None
    y = ops.linear(x, pack_with_bias(ops, weight, encoding, bias))
    assert y.dtype == dtype
    expected, magnitude_sums = expected_product(weight, encoding, x, bias)
    assert_is_rounded(y, expected, magnitude_sums)
    if encoding == "int8" and dtype == torch.float32:
        assert torch.equal(y, expected)  # sums of integers do not depend on their order


def rows_with_outliers(in_features: int) -> Tensor:
    """Return rows ``[60, in_features]`` with outliers. Some rows need more than the maximum of extra bytes.

    A number takes n extra bytes if its magnitude is above 127 n and at most 127 (n + 1) times the scale.
    """
    x = torch.randn(60, in_features)
    for row in range(1, len(x)):
        num_outliers = min(row % 20, in_features)
        positions = torch.randperm(in_features)[:num_outliers]
        x[row, positions] *= 10 ** torch.empty(num_outliers).uniform_(0, 1 + row / 20)
    x[-1] = 1.0
    x[
        -1, : min(15, in_features // 32)
    ] = -2.0  # each outlier needs one extra byte if it is scaled to 127 times 1.5 or 2
    x[-2] = x[-1]
    x[-2, -1:] = 2.0  # one outlier more than the maximum number of extra bytes
    return x


@pytest.mark.parametrize("in_features", [31, 64, 576, 1500, 4100])
def test_products_of_rows_with_outliers_agree_with_the_definition(
    ops: CpuOps, dtype: torch.dtype, in_features: int
) -> None:
    weight, x = torch.randn(70, in_features), rows_with_outliers(in_features).to(dtype)
    packed_weight = pack_with_bias(ops, weight, "int8")
    y = ops.linear(x, packed_weight)
    expected, magnitude_sums = expected_product(weight, "int8", x, None)
    assert_is_rounded(y, expected, magnitude_sums)
    if dtype == torch.float32:
        assert torch.equal(y, expected)
    for start, end in ((0, 1), (7, 10), (30, 36), (20, 60)):
        assert torch.equal(ops.linear(x[start:end], packed_weight), y[start:end])


@pytest.mark.matrix
@pytest.mark.usefixtures("_restore_num_threads")
@pytest.mark.parametrize("shape", [(300, 1500), (70, 33)], ids=str)
def test_a_row_is_bit_equal_in_every_batch(
    ops: CpuOps, encoding: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x, packed_weight = torch.randn(700, shape[1]).to(dtype), pack_with_bias(ops, torch.randn(shape), encoding)
    batch_result = ops.linear(x, packed_weight)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for start, end in ((0, 0), (0, 1), (3, 5), (6, 9), (0, 4), (2, 7), (0, 6), (1, 8), (0, 33), (0, 700)):
            assert torch.equal(ops.linear(x[start:end], packed_weight), batch_result[start:end])


@pytest.mark.matrix(strength=1)
@pytest.mark.usefixtures("_restore_num_threads")
def test_more_rows_than_one_quantization_pass_are_bit_equal(ops: CpuOps, encoding: str) -> None:
    x, packed_weight = (
        torch.randn(300, 40000).bfloat16(),
        pack_with_bias(ops, torch.randn(3, 40000), encoding),
    )
    torch.set_num_threads(2)
    batch_result = ops.linear(x, packed_weight)
    torch.set_num_threads(1)
    assert torch.equal(ops.linear(x[250:], packed_weight), batch_result[250:])
    assert torch.equal(ops.linear(x[:40], packed_weight), batch_result[:40])


def test_rows_of_results_above_4_mib_equal_rows_of_smaller_results(ops: CpuOps, dtype: torch.dtype) -> None:
    """Tiles write results below 4 MiB directly. Larger results are written when a whole panel is computed."""
    packed_weight = pack_with_bias(ops, torch.randn(4096, 40), "int8", torch.randn(4096).to(dtype))
    x = torch.randn(520, 40).to(dtype)
    full_result = ops.linear(x, packed_weight)
    assert torch.equal(full_result[100:103], ops.linear(x[100:103], packed_weight))
    activated_result = ops.activated_linear(x, packed_weight, "gelu")
    assert torch.equal(activated_result, ops.activation(full_result, "gelu"))
    assert torch.equal(activated_result[100:103], ops.activated_linear(x[100:103], packed_weight, "gelu"))


@pytest.mark.matrix
@pytest.mark.parametrize("invalid_value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("num_rows", [5, 40])
@pytest.mark.parametrize("position", [0, 130])  # within a full SIMD vector, and in the remainder of the row
def test_only_a_row_with_a_non_finite_value_gives_nan(
    ops: CpuOps, encoding: str, dtype: torch.dtype, num_rows: int, position: int, invalid_value: float
) -> None:
    x, packed_weight = (
        torch.randn(num_rows, 131).to(dtype),
        pack_with_bias(ops, torch.randn(70, 131), encoding),
    )
    plain_result = ops.linear(x, packed_weight)
    x[3, position] = invalid_value
    y = ops.linear(x, packed_weight)
    assert y[3].isnan().all()
    other_rows = [row for row in range(num_rows) if row != 3]
    assert torch.equal(y[other_rows], plain_result[other_rows])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("num_rows", [1, 9])
def test_sums_of_extreme_values_are_exact(ops: CpuOps, sign: int, num_rows: int) -> None:
    in_features = 14336
    packed_weight = pack_with_bias(ops, torch.full((2, in_features), 127.0 * sign), "int8")
    y = ops.linear(torch.full((num_rows, in_features), 127.0), packed_weight)
    assert torch.equal(y, torch.full((num_rows, 2), float(127 * 127 * in_features * sign)))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("encoding", "lowest_integer"), [("int4", -8.0), ("int5", -16.0)])
def test_group_sums_of_extreme_values_are_exact(
    ops: CpuOps, encoding: str, lowest_integer: float, sign: int
) -> None:
    """All weights are the lowest or highest integer and all activations are 127 or -127.

    Intermediate sums need all 16 bits.
    """
    packed_weight = pack_with_bias(ops, torch.full((2, 64), lowest_integer), encoding)
    assert torch.equal(
        ops.linear(torch.full((3, 64), 127.0 * sign), packed_weight),
        torch.full((3, 2), lowest_integer * 127 * 64 * sign),
    )
    rows = torch.tensor([[-lowest_integer - 1, lowest_integer] * 32])
    packed_weight = ops.pack_quantized(
        {"weight": rows.to(torch.int8), "scales": torch.ones(1, 2).half()}, encoding, bias=None, slices=()
    )
    x = torch.tensor([[127.0 * sign, -127.0 * sign] * 32])
    assert ops.linear(x, packed_weight).tolist() == [[sign * 127.0 * (-2 * lowest_integer - 1) * 32]]
    packed_weight = ops.pack_quantized(
        {"weight": (-lowest_integer - 1 + 0 * rows).to(torch.int8), "scales": torch.ones(1, 2).half()},
        encoding,
        bias=None,
        slices=(),
    )
    assert (
        ops.linear(torch.full((2, 64), 127.0 * sign), packed_weight).tolist()
        == [[sign * 127.0 * (-lowest_integer - 1) * 64]] * 2
    )


def test_nothing_beyond_the_outputs_is_written(ops: CpuOps, encoding: str, dtype: torch.dtype) -> None:
    x, packed_weight = torch.randn(9, 40).to(dtype), pack_with_bias(ops, torch.randn(70, 40), encoding)
    y = torch.full((9, 72), 5.0, dtype=dtype)
    scales = packed_weight.tensors.get("scales")
    ops._kernels.linear(
        {"int8": 2, "int4": 3, "int5": 4}[encoding],
        int(dtype == torch.bfloat16),
        x.data_ptr(),
        40,
        packed_weight.tensors["panels"].data_ptr(),
        0 if scales is None else scales.data_ptr(),
        0,
        0,
        y.data_ptr(),
        72,
        9,
        70,
        40,
        2,  # GELU
    )
    assert torch.equal(y[:, :70], ops.activation(ops.linear(x, packed_weight), "gelu"))
    assert bool((y[:, 70:] == 5).all())


def test_a_non_finite_weight_gives_nan_in_its_output(ops: CpuOps, encoding: str) -> None:
    weight = torch.randn(70, 100)
    weight[7, 99], weight[66, 0] = math.nan, math.inf
    y = ops.linear(torch.randn(3, 100), pack_with_bias(ops, weight, encoding))
    assert y[:, [7, 66]].isnan().all()
    y[:, [7, 66]] = 0
    assert y.isfinite().all()
