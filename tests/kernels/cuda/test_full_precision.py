"""Convolutions in full precision, and sums over experts in a fixed order, of the CUDA back end."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.convolution import PackedConv1d, PackedConvTranspose1d
from penstock.kernels.cuda.convolution import CudaConvolution
from penstock.kernels.reference.convolution import ReferenceConvolution

SHAPES = list(product((1, 2, 4), (1, 4), (1, 3), (0, 5), (1, 2), (1, 20)))
"""(groups, kernel size, stride, padding, dilation, rows)"""


def assert_equals_reference(name: str, packed: PackedConv1d | PackedConvTranspose1d, x: Tensor) -> None:
    """Check that a convolution equals the reference.

    The methods do not use ``self``, so None stands for it.
    """
    actual, reference = (
        getattr(back_end, name)(None, x, packed) for back_end in (CudaConvolution, ReferenceConvolution)
    )
    torch.testing.assert_close(actual, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_bias", [False, True])
def test_convolutions_by_matrix_products_equal_the_reference(has_bias: bool) -> None:
    torch.manual_seed(0)
    bias, num_comparisons = torch.randn(12) if has_bias else None, 0
    for groups, kernel_size, stride, padding, dilation, rows in SHAPES:
        x = torch.randn(rows, 16)[:, :8]
        weight = torch.randn(12, 8 // groups, kernel_size)
        conv = PackedConv1d(8, 12, kernel_size, stride, padding, dilation, groups, weight=weight, bias=bias)
        if conv.output_length(rows):
            assert_equals_reference("_grouped_conv1d", conv, x)
            num_comparisons += 1
        for output_padding in range(stride):
            weight = torch.randn(8, 12 // groups, kernel_size)
            transposed_conv = PackedConvTranspose1d(
                8,
                12,
                kernel_size,
                stride,
                padding,
                output_padding,
                dilation,
                groups,
                weight=weight,
                bias=bias,
            )
            if transposed_conv.output_length(rows) > 0:
                assert_equals_reference("_grouped_conv_transpose1d", transposed_conv, x)
                num_comparisons += 1
    assert num_comparisons > len(SHAPES)


def test_each_index_add_call_has_distinct_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU adds the values of one call in any order, so repeated rows would give different sums."""
    pytest.importorskip("triton")
    from penstock.kernels.cuda.ops import CudaOps

    index_add, calls = Tensor.index_add_, []

    def record_rows(self: Tensor, head_dim: int, rows: Tensor, values: Tensor) -> Any:
        calls.append(rows.tolist())
        return index_add(self, head_dim, rows, values)

    monkeypatch.setattr(Tensor, "index_add_", record_rows)
    total, values = torch.zeros(4, 2), torch.arange(10.0).view(5, 2)
    CudaOps()._add_pairs(total, torch.tensor([1, 3, 1, 2, 1]), values, [2, 2, 1])
    assert calls == [[1, 3], [1, 2], [1]]
    assert total.tolist() == [[0, 0], [12, 15], [6, 7], [2, 3]]
