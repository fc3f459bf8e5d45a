"""The acoustic encoder of NeuCodec: strided convolutions and alias-free activations (Xin et al. 2024,
arXiv:2409.05377; Lee et al. 2022, arXiv:2206.04658)."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor

from penstock.codecs.layers import SNAKE_EPS, CodecLoader, Conv1d, RaggedRows, Snake
from penstock.kernels import Ops

_DILATIONS = (1, 3, 9)
_KERNEL_SIZE = 7
_NUM_TAPS = 12
"""Number of taps of the low-pass filter."""
_HALF_TAPS = _NUM_TAPS // 2


@dataclass(frozen=True, slots=True)
class AliasFreeSnake:
    """A snake activation at twice the sampling rate, with a low-pass filter before and after it.

    Upsampling takes two convolutions: `even_upsampling` computes the even output samples, `odd_upsampling`
    the odd output samples. `downsampling` filters the result and halves the rate.
    """

    even_upsampling: Conv1d
    odd_upsampling: Conv1d
    snake: Snake
    downsampling: Conv1d

    def __call__(self, x: RaggedRows, ops: Ops) -> RaggedRows:
        """``x [T, C] -> [T, C]``, one sequence."""
        rows, num_rows = x.rows, len(x.rows)
        padded = _pad_with_edges(rows, _HALF_TAPS - 1, _HALF_TAPS - 1)
        phases = [
            conv(_one_sequence(padded[start : start + num_rows + _HALF_TAPS - 1]), ops).rows
            for conv, start in ((self.even_upsampling, 2), (self.odd_upsampling, 3))
        ]
        interleaved = torch.stack(phases, 1).view(2 * num_rows, -1)
        upsampled = ops.snake(interleaved, self.snake.alpha, self.snake.beta)
        return self.downsampling(_one_sequence(_pad_with_edges(upsampled, _HALF_TAPS - 1, _HALF_TAPS)), ops)


@dataclass(frozen=True, slots=True)
class AliasFreeUnit:
    """A residual unit: activation, dilated convolution, activation, pointwise convolution."""

    first_snake: AliasFreeSnake
    dilated_conv: Conv1d
    second_snake: AliasFreeSnake
    pointwise_conv: Conv1d

    def __call__(self, x: RaggedRows, ops: Ops) -> RaggedRows:
        hidden = self.dilated_conv(self.first_snake(x, ops), ops)
        hidden = self.pointwise_conv(self.second_snake(hidden, ops), ops)
        return RaggedRows(ops.add(x.rows, hidden.rows), x.lengths)


@dataclass(frozen=True, slots=True)
class DownsamplingBlock:
    """Three residual units, an activation, and a strided convolution that lowers the rate."""

    units: tuple[AliasFreeUnit, ...]
    snake: AliasFreeSnake
    downsample: Conv1d

    def __call__(self, x: RaggedRows, ops: Ops) -> RaggedRows:
        for unit in self.units:
            x = unit(x, ops)
        return self.downsample(self.snake(x, ops), ops)


@dataclass(frozen=True, slots=True)
class AcousticEncoder:
    """Converts samples ``[S]`` to rows ``[S / hop, E]`` by strided convolutions."""

    first_conv: Conv1d
    blocks: tuple[DownsamplingBlock, ...]
    snake: AliasFreeSnake
    last_conv: Conv1d

    def __call__(self, samples: Tensor, ops: Ops) -> Tensor:
        """``samples [S] -> [S / hop, E]``. S must be a multiple of hop, the product of the strides."""
        x = self.first_conv(_one_sequence(samples[:, None]), ops)
        for block in self.blocks:
            x = block(x, ops)
        return self.last_conv(self.snake(x, ops), ops).rows


def read_acoustic_encoder(
    loader: CodecLoader, channels: int, strides: tuple[int, ...], hidden_size: int
) -> AcousticEncoder:
    """Return the encoder, read from the tensors ``acoustic_encoder.*``.

    Args:
        loader: reads and packs layers.
        channels: number of channels of the first convolution. Each block doubles the number.
        strides: the stride of each block.
        hidden_size: E, the width of the rows.

    Raises:
        CheckpointError: a tensor is missing or misshapen.
    """
    name = "acoustic_encoder"
    first_conv = loader.conv1d(f"{name}.conv1", 1, channels, _KERNEL_SIZE, padding=_KERNEL_SIZE // 2)
    blocks = []
    for index, stride in enumerate(strides):
        block = f"{name}.block.{index}"
        units = tuple(
            _read_unit(loader, f"{block}.res_unit{number}", channels, dilation)
            for number, dilation in enumerate(_DILATIONS, 1)
        )
        snake = _read_snake(loader, f"{block}.snake1", channels)
        downsample = loader.conv1d(
            f"{block}.conv1", channels, 2 * channels, 2 * stride, stride=stride, padding=-(-stride // 2)
        )
        blocks.append(DownsamplingBlock(units, snake, downsample))
        channels *= 2
    return AcousticEncoder(
        first_conv,
        tuple(blocks),
        _read_snake(loader, f"{name}.snake1", channels),
        loader.conv1d(f"{name}.conv2", channels, hidden_size, 3, padding=1),
    )


def _read_unit(loader: CodecLoader, name: str, channels: int, dilation: int) -> AliasFreeUnit:
    dilated_conv = loader.conv1d(
        f"{name}.conv1",
        channels,
        channels,
        _KERNEL_SIZE,
        padding=_KERNEL_SIZE // 2 * dilation,
        dilation=dilation,
    )
    return AliasFreeUnit(
        _read_snake(loader, f"{name}.snake1", channels),
        dilated_conv,
        _read_snake(loader, f"{name}.snake2", channels),
        loader.conv1d(f"{name}.conv2", channels, channels, 1),
    )


def _read_snake(loader: CodecLoader, name: str, channels: int) -> AliasFreeSnake:
    taps = low_pass_filter()

    def depthwise(filter_taps: Tensor, stride: int = 1) -> Conv1d:
        weight = filter_taps.expand(channels, 1, -1)
        return Conv1d(loader.ops.pack_conv1d(weight, "float32", stride=stride, groups=channels))

    alpha = loader.tensor(f"{name}.act.alpha", channels).exp()
    beta = 1 / (loader.tensor(f"{name}.act.beta", channels).exp() + SNAKE_EPS)
    phases = (2 * taps.flip(0)).view(_HALF_TAPS, 2).T.contiguous()  # taps for the even and the odd samples
    return AliasFreeSnake(depthwise(phases[0]), depthwise(phases[1]), Snake(alpha, beta), depthwise(taps, 2))


def low_pass_filter() -> Tensor:
    """Return the taps ``[12]`` of a low-pass filter that passes the lower half of the bandwidth.

    The taps are a sinc times a Kaiser window, divided by their sum.
    """
    cutoff, width = 0.25, 0.3
    attenuation = 2.285 * (_HALF_TAPS - 1) * pi * 4 * width + 7.95
    window = torch.kaiser_window(_NUM_TAPS, periodic=False, beta=0.1102 * (attenuation - 8.7))
    times = torch.arange(_NUM_TAPS) - _HALF_TAPS + 0.5
    taps = window * torch.sinc(2 * cutoff * times)
    return taps / taps.sum()


def _one_sequence(rows: Tensor) -> RaggedRows:
    """Return ``rows [T, C]`` as a ragged batch of one sequence."""
    return RaggedRows(rows, [len(rows)])


def _pad_with_edges(rows: Tensor, num_before: int, num_after: int) -> Tensor:
    """Return the rows with ``num_before`` copies of the first and ``num_after`` copies of the last row."""
    return torch.cat([rows[:1].expand(num_before, -1), rows, rows[-1:].expand(num_after, -1)])
