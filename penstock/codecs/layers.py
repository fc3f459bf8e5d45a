"""Layers of convolutional codecs for ragged batches ``[T, C]``, and `CodecLoader`, which reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from penstock.codecs.weights import CodecWeights
from penstock.kernels import Ops, PackedConv1d, PackedConvTranspose1d, PackedLinear

SNAKE_EPS = 1e-9

_WEIGHT_NORM_NAMES = (
    ("parametrizations.weight.original0", "parametrizations.weight.original1"),
    ("weight_g", "weight_v"),
)
"""Tensor names of the magnitude and the direction of a weight-normalized layer, by torch version (new, old).
"""


@dataclass(slots=True)
class RaggedRows:
    """A ragged batch: the rows of several sequences, concatenated."""

    rows: Tensor
    """``[T, C]``."""
    lengths: list[int]
    """Number of rows of each sequence."""

    @property
    def offsets(self) -> Tensor:
        """The offsets of the sequences in `rows`, ``[B + 1]`` int32."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)

    def split(self) -> Sequence[Tensor]:
        """Return the rows of each sequence."""
        return torch.split(self.rows, self.lengths)

    def slice(self, ranges: Sequence[tuple[int, int]]) -> RaggedRows:
        """Return a batch with the rows ``begin`` to ``end - 1`` of each sequence, by its ``(begin, end)``."""
        row_slices = [rows[begin:end] for rows, (begin, end) in zip(self.split(), ranges, strict=True)]
        rows = row_slices[0] if len(row_slices) == 1 else torch.cat(row_slices)
        return RaggedRows(rows, [len(row_slice) for row_slice in row_slices])


@dataclass(frozen=True, slots=True)
class Snake:
    """The snake activation ``x + sin(alpha * x)**2 * beta`` (arXiv:2006.08195)."""

    alpha: Tensor  # [C]
    beta: Tensor  # [C]; 1 / (alpha + SNAKE_EPS) in checkpoints without a separate parameter

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        return ops.snake(x, self.alpha, self.beta)


@dataclass(frozen=True, slots=True)
class Conv1d:
    """A 1-d convolution over time."""

    packed: PackedConv1d

    def __call__(self, x: RaggedRows, ops: Ops) -> RaggedRows:
        lengths = [self.packed.output_length(length) for length in x.lengths]
        return RaggedRows(ops.conv1d(x.rows, self.packed, x.offsets), lengths)


@dataclass(frozen=True, slots=True)
class ConvTranspose1d:
    """A transposed 1-d convolution over time."""

    packed: PackedConvTranspose1d

    def __call__(self, x: RaggedRows, ops: Ops) -> RaggedRows:
        lengths = [self.packed.output_length(length) for length in x.lengths]
        return RaggedRows(ops.conv_transpose1d(x.rows, self.packed, x.offsets), lengths)


class CodecLoader:
    """Reads the layers of a codec by their checkpoint names and packs each layer once.

    Args:
        weights: the tensors of the checkpoint.
        ops: the back end that packs the layers.
        encoding: encoding of linear layers and of convolutions with one group.
        min_channels: convolutions with fewer output channels stay in float32. These layers take little time.
            They are the last layers of a codec, so their rounding errors would be audible.
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
        """Return the weight of a layer. Weight normalization (arXiv:1602.07868) is applied."""
        magnitude_shape = (shape[0], *[1] * (len(shape) - 1))
        for magnitude, direction in _WEIGHT_NORM_NAMES:
            if f"{layer}.{magnitude}" in self.weights:
                v = self.tensor(f"{layer}.{direction}", *shape)
                length: Tensor = torch.linalg.vector_norm(v.flatten(1), dim=1).view(magnitude_shape)
                return self.tensor(f"{layer}.{magnitude}", *magnitude_shape) * v / length
        return self.tensor(f"{layer}.weight", *shape)

    def norm(self, layer: str, size: int) -> tuple[Tensor, Tensor]:
        """Return the weight and the bias of a layer norm, ``[size]`` each."""
        return self.tensor(f"{layer}.weight", size), self.tensor(f"{layer}.bias", size)

    def linear(
        self, layer: str, in_features: int, out_features: int, *, has_bias: bool = True
    ) -> PackedLinear:
        """Return the linear layer called ``layer``."""
        weight = self.weight(layer, out_features, in_features)
        bias = self.tensor(f"{layer}.bias", out_features) if has_bias else None
        return self.ops.pack_linear(weight, self.encoding, bias=bias)

    def pointwise(self, layer: str, in_features: int, out_features: int) -> PackedLinear:
        """Return the linear layer that is stored as a convolution with kernel size 1."""
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
        """Return the convolution called ``layer``."""
        weight = self.weight(layer, out_channels, in_channels // groups, kernel_size)
        bias = self.tensor(f"{layer}.bias", out_channels) if has_bias else None
        packed = self.ops.pack_conv1d(
            weight,
            self._conv_encoding(out_channels),
            bias=bias,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
        )
        return Conv1d(replace(packed, linear=_with_bias(packed.linear, bias)))

    def upsample(self, layer: str, in_channels: int, out_channels: int, stride: int) -> ConvTranspose1d:
        """Return a transposed convolution that computes exactly ``stride`` output rows for each input row."""
        weight = self.weight(layer, in_channels, out_channels, 2 * stride)
        bias = self.tensor(f"{layer}.bias", out_channels)
        packed = self.ops.pack_conv_transpose1d(
            weight,
            self._conv_encoding(out_channels),
            bias=bias,
            stride=stride,
            padding=-(-stride // 2),
            output_padding=stride % 2,
        )
        return ConvTranspose1d(replace(packed, linear=_with_bias(packed.linear, bias.repeat(stride))))

    def _conv_encoding(self, out_channels: int) -> str:
        return self.encoding if out_channels >= self._min_channels else "float32"

    def snake(self, layer: str, channels: int) -> Snake:
        """Return the snake activation whose alpha is stored as ``[1, C, 1]``."""
        alpha = self.tensor(f"{layer}.alpha", 1, channels, 1).flatten().contiguous()
        return Snake(alpha, 1 / (alpha + SNAKE_EPS))


def _with_bias(linear: PackedLinear | None, bias: Tensor | None) -> PackedLinear | None:
    """Return a layer with this bias in float32, which is the type of a codec's activations.

    `Ops.pack_linear` has rounded the layer's own bias to the compute type of the encoding, such as bfloat16.
    """
    return linear if linear is None else replace(linear, bias=bias)
