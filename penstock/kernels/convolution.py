"""The operations of audio codecs, such as convolution over time, snake activation and inverse STFT.

Sequences are matrices ``[T, C]`` with one row per time step. A convolution with one group is computed as a
linear layer whose input rows are windows of the sequence; a transposed convolution only if its dilation is
also 1. It therefore uses the kernels and weight encodings of linear layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.linear import LinearSlice, PackedLinear
from penstock.kernels.operations import CFunction, operation


@dataclass(frozen=True, slots=True)
class PackedConv1d:
    """A convolution over time, packed by an `Ops` for its own `conv1d`.

    Exactly one of ``linear``, ``taps`` and ``weight`` is set.
    """

    in_channels: int
    out_channels: int
    kernel_size: int
    stride: int = 1
    padding: int = 0
    """Number of zero rows that are added at each end of a sequence."""
    dilation: int = 1
    groups: int = 1
    linear: PackedLinear | None = None
    """Set for one group: a linear layer ``[out, kernel_size * in]``, inputs sorted by tap, then channel."""
    taps: Tensor | None = None
    """Set for a depthwise convolution of C channels: ``[kernel_size, C]`` float32, and a float32 ``bias``."""
    weight: Tensor | None = None
    """Set for all other convolutions: ``[out, in / groups, kernel_size]``."""
    bias: Tensor | None = None
    """``[out]``; None if there is no bias, or if ``linear`` contains it."""

    def output_length(self, length: int) -> int:
        """Return the number of output rows of a sequence of ``length`` input rows."""
        window = self.dilation * (self.kernel_size - 1) + 1
        return max((length + 2 * self.padding - window) // self.stride + 1, 0)


@dataclass(frozen=True, slots=True)
class PackedConvTranspose1d:
    """A transposed convolution over time, packed by an `Ops` for its own `conv_transpose1d`.

    Either ``linear`` or ``weight`` is set.
    """

    in_channels: int
    out_channels: int
    kernel_size: int
    stride: int = 1
    padding: int = 0
    """Number of output rows that are dropped at each end of a sequence."""
    output_padding: int = 0
    """Number of additional output rows at the end of a sequence."""
    dilation: int = 1
    groups: int = 1
    linear: PackedLinear | None = None
    """Set for one group without dilation: ``[stride * out, n * in]``, with n = `inputs_per_output`.

    The layer computes ``stride`` output rows from n input rows."""
    weight: Tensor | None = None
    """Set for several groups or a dilation: ``[in, out / groups, kernel_size]``."""
    bias: Tensor | None = None
    """``[out]``; None if there is no bias, or if ``linear`` contains it."""

    @property
    def inputs_per_output(self) -> int:
        """Maximum number of input rows that an output row depends on, for a dilation of 1."""
        return -(-self.kernel_size // self.stride)

    def output_length(self, length: int) -> int:
        """Return the number of output rows of a sequence of ``length`` input rows."""
        if not length:
            return 0
        window = self.dilation * (self.kernel_size - 1) + 1
        return (length - 1) * self.stride - 2 * self.padding + window + self.output_padding


class ConvolutionOps(ABC):
    """The operations of `Ops` that only audio codecs need."""

    @abstractmethod
    def pack_linear(
        self,
        weight: Tensor | Sequence[Tensor],
        encoding: str,
        *,
        bias: Tensor | None = None,
        slices: Sequence[LinearSlice] = (),
    ) -> PackedLinear:
        """See `Ops.pack_linear`."""

    def pack_conv1d(
        self,
        weight: Tensor,  # [out, in / groups, kernel_size]
        encoding: str,
        *,
        bias: Tensor | None = None,  # [out]
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
    ) -> PackedConv1d:
        """Pack a convolution for `conv1d`. The encoding is ignored unless ``groups`` is 1.

        Raises:
            ConfigError: ``groups`` is 1 and the encoding is unknown.
        """
        out_channels, in_channels_per_group, kernel_size = weight.shape
        linear: PackedLinear | None = None
        taps: Tensor | None = None
        grouped_weight: Tensor | None = None
        if groups == 1:
            rows = weight.permute(0, 2, 1).reshape(out_channels, -1)
            linear, bias = self.pack_linear(rows, encoding, bias=bias), None
        elif in_channels_per_group == 1 and out_channels == groups:
            taps = weight[:, 0].t().float().contiguous()
            bias = None if bias is None else bias.float().contiguous()
        else:
            grouped_weight = weight.contiguous()
        shape = (in_channels_per_group * groups, out_channels, kernel_size)
        return PackedConv1d(*shape, stride, padding, dilation, groups, linear, taps, grouped_weight, bias)

    def pack_conv_transpose1d(
        self,
        weight: Tensor,  # [in, out / groups, kernel_size]
        encoding: str,
        *,
        bias: Tensor | None = None,  # [out]
        stride: int = 1,
        padding: int = 0,
        output_padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
    ) -> PackedConvTranspose1d:
        """Pack a transposed convolution for `conv_transpose1d`.

        The encoding is ignored unless ``groups`` and ``dilation`` are 1.

        Raises:
            ConfigError: ``groups`` and ``dilation`` are 1, and the encoding is unknown.
        """
        in_channels, out_channels_per_group, kernel_size = weight.shape
        linear: PackedLinear | None = None
        grouped_weight: Tensor | None = weight.contiguous()
        if groups == dilation == 1:
            # Output row q * stride + r, without ``padding``, is the sum over i < inputs_per_output of the
            # products of tap r + i * stride and input row q - i.
            inputs_per_output = -(-kernel_size // stride)
            taps = F.pad(weight, (0, inputs_per_output * stride - kernel_size)).view(
                in_channels, out_channels_per_group, inputs_per_output, stride
            )
            rows = (
                taps.flip(2)
                .permute(3, 1, 2, 0)
                .reshape(stride * out_channels_per_group, inputs_per_output * in_channels)
            )
            repeated_bias = None if bias is None else bias.repeat(stride)
            linear, grouped_weight, bias = self.pack_linear(rows, encoding, bias=repeated_bias), None, None
        shape = (in_channels, out_channels_per_group * groups, kernel_size)
        fields = (stride, padding, output_padding, dilation, groups)
        return PackedConvTranspose1d(*shape, *fields, linear, grouped_weight, bias)

    @operation(
        weights=["packed"],
        is_recordable=False,
        functions={"depthwise_conv1d": CFunction("q 4P 8q", can_be_long=True)},
    )
    @abstractmethod
    def conv1d(
        self,
        x: Tensor,  # [T, in]
        packed: PackedConv1d,
        row_offsets: Tensor,  # [B + 1] int32
    ) -> Tensor:  # [sum of output lengths, out]
        """Return the convolution of each sequence of a ragged batch. Sequences are padded with zero rows.

        Output row t of a sequence is ``bias + sum over j of weight[:, :, j] @ x[t * stride + j * dilation -
        padding]``, within each group of channels. `PackedConv1d.output_length` returns the number of output
        rows of a sequence.
        """

    @operation(weights=["packed"], is_recordable=False)
    @abstractmethod
    def conv_transpose1d(
        self,
        x: Tensor,  # [T, in]
        packed: PackedConvTranspose1d,
        row_offsets: Tensor,  # [B + 1] int32
    ) -> Tensor:  # [sum of output lengths, out]
        """Return the transposed convolution of each sequence of a ragged batch.

        Input row t adds ``weight[:, :, j].T @ x[t]`` to output row ``t * stride + j * dilation - padding``,
        within each group of channels. The bias is added to each output row.
        `PackedConvTranspose1d.output_length` returns the number of output rows of a sequence.
        """

    @operation(weights=["alpha", "beta"], functions={"snake": CFunction("q 4P 3q")})
    @abstractmethod
    def snake(self, x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        """Return ``x + beta * sin(alpha * x)**2`` for ``x [T, C]``, ``alpha, beta [C]`` float32.

        Computed in float32, returned in x's type (Ziyin et al. 2020, arXiv:2006.08195).
        """

    @operation(functions={"add_scaled": CFunction("q 4P 4q")})
    @abstractmethod
    def add_scaled(self, x: Tensor, y: Tensor, factors: Tensor) -> Tensor:
        """Return ``x + factors[:, None] * y`` for ``x, y [T, C]``, ``factors [T]`` float32.

        The result has x's type.
        """

    @operation(
        weights=["weight", "bias"],
        is_recordable=False,
        functions={"group_norm": CFunction("q 4P 4q d")},
    )
    @abstractmethod
    def group_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, row_offsets: Tensor
    ) -> Tensor:
        """Return the group norm of ``x [T, C]``, with statistics over all rows of a sequence.

        Each group of channels of each sequence is normalized to mean 0 and variance 1, multiplied by ``weight
        [C]`` float32 and increased by ``bias [C]`` float32. Computed in float32, returned in x's type (Wu and
        He 2018, arXiv:1803.08494).
        """

    @operation(functions={"polar": CFunction("q 2P 3q d")})
    @abstractmethod
    def polar(self, x: Tensor, limit: float) -> Tensor:
        """Return the complex numbers ``[T, 2F]`` float32 with the log magnitudes and phases in ``x [T, 2F]``.

        The first F columns of x are natural logarithms of magnitudes, and the last F columns are phases in
        radians. Magnitudes are clamped to ``limit``. The result has F real parts, then F imaginary parts.
        """

    @operation(weights=["squares"], is_recordable=False, functions={"overlap_add": CFunction("3P 4q")})
    @abstractmethod
    def overlap_add(self, frames: Tensor, squares: Tensor, hop: int, row_offsets: Tensor) -> Tensor:
        """Add the overlapping frames of each sequence: ``frames [T, N]`` float32 -> ``[T * hop]`` samples.

        Frame t begins ``hop`` samples after frame t - 1. ``squares [N]`` is the squared window. A sample is
        the sum of the entries of the overlapping frames at its position, divided by the sum of the entries of
        ``squares`` at the same indices. ``(N - hop) / 2`` samples are dropped at each end of a sequence; N -
        hop is even. The inverse short-time Fourier transform is a linear layer with the weight
        `inverse_dft_weight`, followed by this operation.
        """


def inverse_dft_weight(window: Tensor) -> Tensor:
    """Return the weight ``[N, N + 2]`` float32 of a linear layer: inverse real DFT, then ``window [N]``.

    The inputs of the layer are ``N / 2 + 1`` real parts, then ``N / 2 + 1`` imaginary parts. N must be even.
    """
    window_size = len(window)
    times = torch.arange(window_size, dtype=torch.float64)[:, None]
    frequencies = torch.arange(window_size // 2 + 1, dtype=torch.float64)
    angles = times * frequencies % window_size * (2 * torch.pi / window_size)
    # A frequency other than the first and the last also stands for its conjugate, which is not an input.
    multiplicities = torch.full((window_size // 2 + 1,), 2.0, dtype=torch.float64)
    multiplicities[0] = multiplicities[-1] = 1
    parts = torch.cat([multiplicities * angles.cos(), -multiplicities * angles.sin()], 1) / window_size
    return (parts * window.double()[:, None]).float()
