"""Layers of convolutional codecs over ragged rows ``[T, C]``, and their loading by checkpoint names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from penstock.codecs.weights import CodecWeights
from penstock.kernels import Ops, PackedConv1d, PackedConvTranspose1d, PackedLinear

SNAKE_EPS = 1e-9

_NORMALISED = (
    ("parametrizations.weight.original0", "parametrizations.weight.original1"),
    ("weight_g", "weight_v"),
)
"""Tensor names of a weight-normalised layer, magnitude and direction: the current ones of torch, the former
ones."""


@dataclass(slots=True)
class RaggedRows:
    """Rows of several sequences, one after the other."""

    rows: Tensor
    """``[T, C]``."""
    lengths: list[int]
    """Rows of each sequence."""

    @property
    def offsets(self) -> Tensor:
        """``[B + 1]`` int32."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)

    def split(self) -> Sequence[Tensor]:
        """Return the rows of each sequence."""
        return torch.split(self.rows, self.lengths)

    def cut(self, ranges: Sequence[tuple[int, int]]) -> RaggedRows:
        """Return the rows of a range of each sequence."""
        parts = [one[begin:end] for one, (begin, end) in zip(self.split(), ranges, strict=True)]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return RaggedRows(rows, [len(part) for part in parts])


@dataclass(frozen=True, slots=True)
class Snake:
    """Add ``sin(alpha * x)**2 / alpha`` to each number."""

    alpha: Tensor  # [C]
    beta: Tensor  # [C], 1 / alpha

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        return ops.snake(x, self.alpha, self.beta)


@dataclass(frozen=True, slots=True)
class Conv1d:
    """A convolution over time."""

    packed: PackedConv1d

    def __call__(self, x: RaggedRows, ops: Ops) -> RaggedRows:
        lengths = [self.packed.output_length(length) for length in x.lengths]
        return RaggedRows(ops.conv1d(x.rows, self.packed, x.offsets), lengths)


@dataclass(frozen=True, slots=True)
class ConvTranspose1d:
    """A transposed convolution over time."""

    packed: PackedConvTranspose1d

    def __call__(self, x: RaggedRows, ops: Ops) -> RaggedRows:
        lengths = [self.packed.output_length(length) for length in x.lengths]
        return RaggedRows(ops.conv_transpose1d(x.rows, self.packed, x.offsets), lengths)


class CodecLoader:
    """Reads layers of a codec by their checkpoint names and packs each once.

    Args:
        weights: the checkpoint.
        ops: the back end that packs the layers.
        encoding: encoding of convolutions with one group and of linear layers.
        min_channels: convolutions with fewer output channels are float32. They take little time, and no later
            layer filters their rounding errors.
    """

    def __init__(
        self, weights: CodecWeights, ops: Ops, encoding: str = "float32", *, min_channels: int = 0
    ) -> None:
        self.weights = weights
        self.ops = ops
        self.encoding = encoding
        self._min_channels = min_channels

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor as float32."""
        return self.weights.tensor(name, shape).float()

    def weight(self, layer: str, *shape: int) -> Tensor:
        """Return the weight of a layer; a normalised weight is multiplied out (arXiv:1602.07868)."""
        norm = (shape[0], *[1] * (len(shape) - 1))
        for scale, direction in _NORMALISED:
            if f"{layer}.{scale}" in self.weights:
                v = self.tensor(f"{layer}.{direction}", *shape)
                length: Tensor = torch.linalg.vector_norm(v.flatten(1), dim=1).view(norm)
                return self.tensor(f"{layer}.{scale}", *norm) * v / length
        return self.tensor(f"{layer}.weight", *shape)

    def norm(self, layer: str, size: int) -> tuple[Tensor, Tensor]:
        """Return weight and bias of a layer norm."""
        return self.tensor(f"{layer}.weight", size), self.tensor(f"{layer}.bias", size)

    def linear(
        self, layer: str, in_features: int, out_features: int, *, has_bias: bool = True
    ) -> PackedLinear:
        """Return a linear layer."""
        weight = self.weight(layer, out_features, in_features)
        bias = self.tensor(f"{layer}.bias", out_features) if has_bias else None
        return self.ops.pack_linear(weight, self.encoding, bias=bias)

    def pointwise(self, layer: str, in_features: int, out_features: int) -> PackedLinear:
        """Return a linear layer that is stored as a convolution of kernel size 1."""
        weight = self.weight(layer, out_features, in_features, 1)[..., 0]
        bias = self.tensor(f"{layer}.bias", out_features)
        return self.ops.pack_linear(weight, self.encoding, bias=bias)

    def conv1d(
        self,
        layer: str,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        has_bias: bool = True,
    ) -> Conv1d:
        """Return a convolution."""
        weight = self.weight(layer, out_channels, in_channels // groups, kernel_size)
        bias = self.tensor(f"{layer}.bias", out_channels) if has_bias else None
        packed = self.ops.pack_conv1d(
            weight,
            self._encoding_of(out_channels),
            bias=bias,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
        )
        return Conv1d(replace(packed, linear=_with_bias(packed.linear, bias)))

    def upsample(self, layer: str, in_channels: int, out_channels: int, stride: int) -> ConvTranspose1d:
        """Return a transposed convolution that gives exactly ``stride`` rows for each row."""
        weight = self.weight(layer, in_channels, out_channels, 2 * stride)
        bias = self.tensor(f"{layer}.bias", out_channels)
        packed = self.ops.pack_conv_transpose1d(
            weight,
            self._encoding_of(out_channels),
            bias=bias,
            stride=stride,
            padding=-(-stride // 2),
            output_padding=stride % 2,
        )
        return ConvTranspose1d(replace(packed, linear=_with_bias(packed.linear, bias.repeat(stride))))

    def _encoding_of(self, out_channels: int) -> str:
        return self.encoding if out_channels >= self._min_channels else "float32"

    def snake(self, layer: str, channels: int) -> Snake:
        """Return a snake activation, whose frequencies are stored as ``[1, C, 1]``."""
        alpha = self.tensor(f"{layer}.alpha", 1, channels, 1).flatten().contiguous()
        return Snake(alpha, 1 / (alpha + SNAKE_EPS))


def _with_bias(linear: PackedLinear | None, bias: Tensor | None) -> PackedLinear | None:
    """Return a layer with its bias as float32, the type of a codec's activations.

    `Ops.pack_linear` converts it to the compute type of the encoding, such as bfloat16.
    """
    return linear if linear is None else replace(linear, bias=bias)
