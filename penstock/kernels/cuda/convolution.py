"""Convolutions with several groups, in full precision.

cuDNN multiplies float32 numbers in TF32, with 10 bits of mantissa, unless a setting of the whole process
forbids it. This module uses matrix products of cuBLAS instead, which are computed in full float32 by default.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.convolution import PackedConv1d, PackedConvTranspose1d
from penstock.kernels.reference.convolution import ReferenceConvolution


class CudaConvolution(ReferenceConvolution):
    """Convolutions with several groups, as one matrix product per group over windows of rows."""

    def _grouped_conv1d(self, x: Tensor, packed: PackedConv1d) -> Tensor:
        assert packed.weight is not None
        groups = packed.groups
        # [out, in / groups, k] -> [groups, k, in / groups, out / groups]
        weight = packed.weight.float().view(groups, -1, *packed.weight.shape[1:]).permute(0, 3, 2, 1)
        padded = F.pad(x, (0, 0, packed.padding, packed.padding))
        y = _convolve(padded, weight, packed.stride, packed.dilation)
        return y if packed.bias is None else y + packed.bias.float()

    def _grouped_conv_transpose1d(self, x: Tensor, packed: PackedConvTranspose1d) -> Tensor:
        """Insert zero rows between the rows of x, then convolve with the reversed taps."""
        assert packed.weight is not None
        stride, groups = packed.stride, packed.groups
        # [in, out / groups, k] -> [groups, k, in / groups, out / groups]
        weight = packed.weight.float().flip(2).view(groups, -1, *packed.weight.shape[1:]).permute(0, 3, 1, 2)
        upsampled = x.new_zeros((len(x) - 1) * stride + 1, x.shape[1])
        upsampled[::stride] = x
        edge_rows = (
            packed.dilation * (packed.kernel_size - 1) - packed.padding
        )  # if negative, rows are dropped
        padded = F.pad(upsampled, (0, 0, edge_rows, edge_rows + packed.output_padding))
        y = _convolve(padded, weight, 1, packed.dilation)
        return y if packed.bias is None else y + packed.bias.float()


def _convolve(x: Tensor, weight: Tensor, stride: int, dilation: int) -> Tensor:
    """Return the convolution ``[num_rows, out]`` of ``x [T, in]`` without padding.

    ``weight`` is ``[num_groups, k, in / num_groups, out / num_groups]``.
    """
    num_groups, kernel_size, group_inputs, _ = weight.shape
    num_rows = (len(x) - dilation * (kernel_size - 1) - 1) // stride + 1
    row_stride, column_stride = x.stride()
    windows = x.as_strided(
        (num_groups, num_rows, kernel_size, group_inputs),
        (group_inputs * column_stride, stride * row_stride, dilation * row_stride, column_stride),
        x.storage_offset(),
    )
    y = torch.bmm(windows.flatten(2), weight.flatten(1, 2))  # [groups, rows, out / groups]
    return y.transpose(0, 1).flatten(1)
