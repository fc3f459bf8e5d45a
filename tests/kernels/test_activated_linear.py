"""`activated_linear` and `sequence_means` on every back end except the reference."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from support.back_ends import back_end_params, fast_back_ends

from penstock.kernels import Activation, LoRAInputs, Ops
from penstock.kernels.encodings import ENCODINGS, encoding_named
from penstock.kernels.linear import LinearSlice
from penstock.kernels.reference import ReferenceOps

COMPARED_ENCODINGS = [name for name in ENCODINGS if name != "float16"]
ACTIVATIONS: list[Activation] = ["silu", "gelu", "gelu_tanh", "relu", "relu2"]


@pytest.fixture(params=back_end_params(fast_back_ends()))
def ops(request: pytest.FixtureRequest) -> Ops:
    torch.manual_seed(0)
    return fast_back_ends(deterministic=True)[request.param]


@pytest.mark.parametrize("encoding", COMPARED_ENCODINGS)
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 32), (200, 96)])
def test_activated_linear_is_bit_equal_to_linear_and_activation(
    ops: Ops, encoding: str, out_features: int, in_features: int
) -> None:
    packed_weight = ops.pack_linear(
        torch.randn(out_features, in_features) / in_features**0.5, encoding, bias=torch.randn(out_features)
    )
    dtype = encoding_named(encoding).compute_dtype.to_torch()
    for rows, activation in zip((1, 2, 7, 13, 40), ACTIVATIONS, strict=True):
        x = torch.randn(rows, 2 * in_features).to(dtype)[:, :in_features]
        expected = ops.activation(ops.linear(x, packed_weight), activation)
        assert torch.equal(ops.activated_linear(x, packed_weight, activation), expected)


@pytest.mark.parametrize("encoding", ["float32", "int8"])
def test_adapters_are_added_before_the_activation(ops: Ops, encoding: str) -> None:
    slices = [LinearSlice("up", 0, 96)]
    packed_weight = ops.pack_linear(torch.randn(96, 32) / 6, encoding, slices=slices)
    dtype = encoding_named(encoding).compute_dtype.to_torch()
    down, up = torch.randn(2, 4, 32).to(dtype) / 6, torch.randn(2, 4, 96).to(dtype) / 2
    lora = LoRAInputs(torch.tensor([0, -1, 1, 0]), {"up": (down, up.transpose(1, 2))})
    x = torch.randn(4, 32).to(dtype)
    actual = ops.activated_linear(x, packed_weight, "gelu", lora=lora)
    assert torch.equal(actual, ops.activation(ops.linear(x, packed_weight, lora=lora), "gelu"))
    plain_result = ops.activated_linear(x, packed_weight, "gelu")
    assert [torch.equal(*rows) for rows in zip(actual, plain_result, strict=True)] == [
        False,
        True,
        False,
        False,
    ]
    result_with_other_slice = ops.activated_linear(
        x, packed_weight, "gelu", lora=LoRAInputs(lora.rows, {"down": (down, up)})
    )
    assert torch.equal(result_with_other_slice, plain_result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 37, 384])
def test_means_of_sequences_equal_torch_and_do_not_depend_on_other_sequences(
    ops: Ops, dtype: torch.dtype, width: int
) -> None:
    row_offsets = [0, *accumulate([3, 1, 70, 5, 200])]
    x = torch.randn(row_offsets[-1], 2 * width).to(dtype)[:, :width]
    actual = ops.sequence_means(x, torch.tensor(row_offsets, dtype=torch.int32))
    assert actual.dtype == torch.float32
    expected = ReferenceOps().sequence_means(x, torch.tensor(row_offsets, dtype=torch.int32))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    for (start, stop), mean in zip(pairwise(row_offsets), actual, strict=True):
        torch.testing.assert_close(mean, x[start:stop].float().mean(0), rtol=1e-5, atol=1e-6)
        single_result = ops.sequence_means(x[start:stop], torch.tensor([0, stop - start], dtype=torch.int32))
        assert torch.equal(single_result[0], mean)
