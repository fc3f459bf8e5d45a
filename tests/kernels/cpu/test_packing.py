"""Packing: panels are bit-equal to those that `LinearEncoding.pack` and `PanelLayout.to_panels` define."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_draws import num_examples
from torch import Tensor

from penstock.kernels import LazyWeight, encoding_named
from penstock.kernels.cpu import variants
from penstock.kernels.cpu.memory import WeightMemory
from penstock.kernels.cpu.ops import CpuOps
from penstock.kernels.cpu.packing import ENCODING_CODES, pack_rows, quantizes_activations

VARIANTS = {ops.isa: ops for ops in variants()}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=VARIANTS or [pytest.param("none", marks=pytest.mark.skip("no kernels are built"))])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return VARIANTS[request.param]


@pytest.fixture(params=ENCODING_CODES)
def encoding(request: pytest.FixtureRequest) -> str:
    return request.param


def tensor_bytes(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    """Return the bytes of tensors, to compare NaNs bit by bit too."""
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def pack(ops: CpuOps, weight: Tensor, encoding: str, importance: Tensor | None) -> Mapping[str, Tensor]:
    if importance is None:
        return ops.pack_linear(weight, encoding).tensors
    tensors = ops.pack_lazily([weight], encoding).tensors
    assert isinstance(tensors, LazyWeight)
    return tensors.pack(importance)


def assert_equals_definition(
    ops: CpuOps, encoding: str, weight: Tensor, importance: Tensor | None = None
) -> None:
    rows = encoding_named(encoding).pack(weight, importance)
    panels = encoding_named(encoding).panels
    assert panels is not None
    expected_panels = tensor_bytes(panels.to_panels(rows))
    assert tensor_bytes(dict(pack(ops, weight, encoding, importance))) == expected_panels
    if quantizes_activations(encoding):  # packing the quantized rows gives the same panels
        repacked = pack_rows(ops._kernels, WeightMemory(), encoding, rows)
        assert tensor_bytes(repacked) == expected_panels


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1), (64, 64), (65, 2), (70, 33), (63, 31), (130, 515), (200, 4)], ids=str
)
def test_weights_of_several_shapes_and_types_are_packed_as_defined(
    ops: CpuOps, encoding: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(shape) * 0.05).to(dtype)
    weight[0, 0] = 30
    assert_equals_definition(ops, encoding, weight)
    wider_tensor = torch.randn(shape[0], shape[1] + 3).to(dtype)
    assert_equals_definition(ops, encoding, wider_tensor[:, 1:-2])  # the rows are not adjacent in memory


@pytest.mark.matrix
@pytest.mark.parametrize("shape", [(64, 64), (70, 33), (63, 31), (130, 515)], ids=str)
def test_weights_with_input_importance_are_packed_as_defined(
    ops: CpuOps, encoding: str, shape: tuple[int, int]
) -> None:
    torch.manual_seed(1)
    weight, importance = torch.randn(shape), torch.randn(shape[1]).mul(3).exp()
    assert_equals_definition(ops, encoding, weight, importance)
    assert_equals_definition(ops, encoding, weight, importance[::2].repeat_interleave(2)[: shape[1]])
    uniform_panels = dict(pack(ops, weight, encoding, torch.ones(shape[1])))
    assert tensor_bytes(uniform_panels) == tensor_bytes(dict(pack(ops, weight, encoding, None)))


NUMBERS = st.one_of(
    st.floats(-100000, 100000, width=32),
    st.floats(-(2**-20), 2**-20, width=32, allow_subnormal=False),
    st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False),
    st.integers(-9, 9).map(float),
)


@pytest.mark.parametrize("encoding", [name for name in ENCODING_CODES if quantizes_activations(name)])
@settings(max_examples=num_examples(20), deadline=None)
@given(
    weight=st.integers(1, 40).flatmap(
        lambda width: st.lists(st.lists(NUMBERS, min_size=width, max_size=width), min_size=1, max_size=5)
    )
)
def test_any_finite_numbers_are_packed_as_defined(encoding: str, weight: list[list[float]]) -> None:
    for ops in VARIANTS.values():
        assert_equals_definition(ops, encoding, torch.tensor(weight))


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 13])
@pytest.mark.parametrize(("encoding", "lowest_integer"), [("int4", -8), ("int5", -16)])
def test_integers_times_a_float16_scale_are_packed_exactly(
    ops: CpuOps, encoding: str, lowest_integer: int, step: int
) -> None:
    """In each group, the weight of largest magnitude is the lowest integer times a float16 value.

    The scale of the group must be this float16 value. Step 1 checks all positive finite float16 values.
    """
    float16_values = torch.arange(1, 0x7C00, step, dtype=torch.int16).view(torch.float16)
    weight = torch.zeros(len(float16_values), 32)
    weight[:, 5] = float16_values.float() * lowest_integer
    weight[:, 6] = float16_values.float() * 7
    assert_equals_definition(ops, encoding, weight)
    tensors = encoding_named(encoding).pack(weight)
    assert torch.equal(tensors["scales"].flatten(), float16_values)
    x = torch.zeros(1, 32)
    x[0, 6] = 127
    y = ops.linear(x, ops.pack_linear(weight, encoding))
    assert torch.equal(y[0], float16_values.float() * 7 * 127)
