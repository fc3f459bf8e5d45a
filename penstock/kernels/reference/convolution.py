"""The operations of audio codecs in plain torch. Each sequence of a batch is computed separately."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.convolution import ConvolutionOps, PackedConv1d, PackedConvTranspose1d
from penstock.kernels.inputs import LoRAInputs
from penstock.kernels.linear import PackedLinear


class ReferenceConvolution(ConvolutionOps):
    """The operations of audio codecs. Convolutions with one group are linear layers over windows of rows."""

    name = "reference"

    @abstractmethod
    def linear(self, x: Tensor, packed: PackedLinear, *, lora: LoRAInputs | None = None) -> Tensor:
        """See `Ops.linear`."""

    def conv1d(self, x: Tensor, packed: PackedConv1d, row_offsets: Tensor) -> Tensor:
        return apply_to_sequences(lambda sequence: self._conv1d(sequence, packed), x, row_offsets)

    def _conv1d(self, x: Tensor, packed: PackedConv1d) -> Tensor:
        """Return the convolution of one sequence ``[T, in]``."""
        num_rows = packed.output_length(len(x))
        if not num_rows:
            return x.new_zeros(0, packed.out_channels)
        if packed.linear is not None:
            padded = F.pad(x, (0, 0, packed.padding, packed.padding)) if packed.padding else x.contiguous()
            return self.linear(_windows(padded, packed, num_rows), packed.linear)
        if packed.taps is not None:
            padded = F.pad(x.float(), (0, 0, packed.padding, packed.padding))
            y = _windows(padded, packed, num_rows).view(num_rows, packed.kernel_size, -1)
            total = torch.zeros_like(y[:, 0])
            for tap in range(packed.kernel_size):
                total += packed.taps[tap] * y[:, tap]
            return (total if packed.bias is None else total + packed.bias).to(x.dtype)
        return self._grouped_conv1d(x.float(), packed).to(x.dtype)

    def _grouped_conv1d(self, x: Tensor, packed: PackedConv1d) -> Tensor:
        """Return the convolution of one sequence ``[T, in]`` float32 with `PackedConv1d.weight`."""
        assert packed.weight is not None
        y = F.conv1d(
            x.t()[None],
            packed.weight.float(),
            None if packed.bias is None else packed.bias.float(),
            packed.stride,
            packed.padding,
            packed.dilation,
            packed.groups,
        )
        return y[0].t()

    def conv_transpose1d(self, x: Tensor, packed: PackedConvTranspose1d, row_offsets: Tensor) -> Tensor:
        return apply_to_sequences(lambda sequence: self._conv_transpose1d(sequence, packed), x, row_offsets)

    def _conv_transpose1d(self, x: Tensor, packed: PackedConvTranspose1d) -> Tensor:
        """Return the transposed convolution of one sequence ``[T, in]``."""
        num_rows, stride = packed.output_length(len(x)), packed.stride
        if not num_rows:
            return x.new_zeros(0, packed.out_channels)
        if packed.linear is not None:
            rows_before = packed.inputs_per_output - 1
            num_windows = -(-(packed.padding + num_rows) // stride)
            padded = F.pad(x, (0, 0, rows_before, max(num_windows - len(x), 0)))
            channels = packed.in_channels
            windows = padded.as_strided((num_windows, (rows_before + 1) * channels), (channels, 1))
            y = self.linear(windows, packed.linear).view(num_windows * stride, packed.out_channels)
            return y[packed.padding : packed.padding + num_rows]
        return self._grouped_conv_transpose1d(x.float(), packed).to(x.dtype)

    def _grouped_conv_transpose1d(self, x: Tensor, packed: PackedConvTranspose1d) -> Tensor:
        """Return the transposed convolution of ``[T, in]`` float32 with `PackedConvTranspose1d.weight`."""
        assert packed.weight is not None
        y = F.conv_transpose1d(
            x.t()[None],
            packed.weight.float(),
            None if packed.bias is None else packed.bias.float(),
            packed.stride,
            packed.padding,
            packed.output_padding,
            packed.groups,
            packed.dilation,
        )
        return y[0].t()

    def snake(self, x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        wide = x.float()
        # float64, because the float32 sine of torch rounds the last elements of a tensor differently from
        # others.
        sine = torch.sin((alpha * wide).double()).float()
        return (wide + beta * sine.square()).to(x.dtype)

    def add_scaled(self, x: Tensor, y: Tensor, factors: Tensor) -> Tensor:
        return (x.float() + factors[:, None] * y.float()).to(x.dtype)

    def group_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, row_offsets: Tensor
    ) -> Tensor:
        def norm(sequence: Tensor) -> Tensor:
            if not len(sequence):
                return sequence
            return torch.group_norm(sequence.float().t()[None], groups, weight, bias, eps)[0].t().to(x.dtype)

        return apply_to_sequences(norm, x, row_offsets)

    def polar(self, x: Tensor, limit: float) -> Tensor:
        log_magnitudes, phases = x.double().chunk(2, dim=-1)  # float64 as in `snake`
        magnitudes = log_magnitudes.exp().clamp(max=limit)
        return torch.cat([magnitudes * phases.cos(), magnitudes * phases.sin()], -1).float()

    def overlap_add(self, frames: Tensor, squares: Tensor, hop: int, row_offsets: Tensor) -> Tensor:
        frame_size = frames.shape[1]
        num_dropped = (frame_size - hop) // 2

        def add(sequence: Tensor) -> Tensor:
            if not len(sequence):
                return sequence.new_zeros(0)
            total, square_sums = (
                _sum_overlapping(sequence, hop),
                _sum_overlapping(squares.expand(len(sequence), frame_size), hop),
            )
            return (total / square_sums)[num_dropped : num_dropped + len(sequence) * hop]

        return apply_to_sequences(add, frames, row_offsets)


def apply_to_sequences(function: Callable[[Tensor], Tensor], x: Tensor, row_offsets: Tensor) -> Tensor:
    """Return the concatenated results of a function for the rows of each sequence."""
    results = [function(x[start:stop]) for start, stop in pairwise(row_offsets.tolist())]
    return results[0] if len(results) == 1 else torch.cat(results)


def _windows(x: Tensor, packed: PackedConv1d, num_rows: int) -> Tensor:
    """Return the concatenated input rows of each output row, ``[num_rows, kernel_size * C]``."""
    channels, kernel_size = x.shape[1], packed.kernel_size
    if packed.dilation == 1:
        return x.as_strided((num_rows, kernel_size * channels), (packed.stride * channels, 1))
    strides = (packed.stride * channels, packed.dilation * channels, 1)
    return x.as_strided((num_rows, kernel_size, channels), strides).reshape(num_rows, kernel_size * channels)


def _sum_overlapping(frames: Tensor, hop: int) -> Tensor:
    """Return the sum ``[(T - 1) hop + N]`` of ``frames [T, N]`` that begin ``hop`` samples apart."""
    num_frames, frame_size = frames.shape
    length = (num_frames - 1) * hop + frame_size
    return F.fold(frames.t()[None], (1, length), (1, frame_size), stride=(1, hop)).view(length)
