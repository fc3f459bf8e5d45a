"""The decoder of SNAC: converts latent rows to samples.

The output contains the samples of a chunk without the samples of its context. Each block drops the rows at
both ends on which no output sample depends. Context therefore takes little time in the last blocks, which
have the most rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.codecs.layers import CodecLoader, Conv1d, ConvTranspose1d, RaggedRows, Snake
from penstock.codecs.snac.config import SnacConfig
from penstock.codecs.snac.noise import noise_at
from penstock.codecs.snac.residual import KERNEL_SIZE, UNITS_MARGIN, ResidualUnit, read_units
from penstock.kernels import Ops

_KERNEL_MARGIN = KERNEL_SIZE // 2


@dataclass(slots=True)
class Span:
    """The position of the rows of a sequence in its stream, in rows at the rate of the current layer."""

    begin: int
    """Position of the first row."""
    output_begin: int
    """Position of the first row of the output; rows before it are left context."""
    end: int
    """Position after the last row of the output; this row and later rows are right context."""

    def scale(self, stride: int) -> Span:
        """Return the span of the same frames at a rate that is ``stride`` times as high."""
        return Span(self.begin * stride, self.output_begin * stride, self.end * stride)

    def trimmed_range(self, margin: int, length: int) -> tuple[int, int]:
        """Return ``(first, end)``: the output's rows with at most ``margin`` rows of context on each side.

        Both are indices into the ``length`` rows that start at `begin`.
        """
        first = max(self.output_begin - margin - self.begin, 0)
        return first, min(self.end + margin - self.begin, length)


@dataclass(frozen=True, slots=True)
class UpsamplingBlock:
    """A snake activation, upsampling, optional noise and three residual units."""

    snake: Snake
    upsample: ConvTranspose1d
    noise: Conv1d | None
    units: tuple[ResidualUnit, ...]
    stride: int
    margin: int
    """Number of rows of context on each side on which the output depends, at the rate of the block's input.
    """


@dataclass(frozen=True, slots=True)
class SnacDecoder:
    """Converts latent rows to samples."""

    first_convs: tuple[Conv1d, ...]
    blocks: tuple[UpsamplingBlock, ...]
    snake: Snake
    last_conv: Conv1d
    margin: int
    """Number of latent rows of context on each side on which a sample depends."""

    def __call__(
        self, latents: RaggedRows, spans: Sequence[Span], ops: Ops, *, with_noise: bool = True
    ) -> list[Tensor]:
        """Return the samples of each sequence without its context, float32: hop samples per latent row."""
        x = latents
        for conv in self.first_convs:
            x = conv(x, ops)
        for layer, block in enumerate(self.blocks):
            x, spans = _trim_context(x, spans, block.margin)
            x = RaggedRows(block.snake(x.rows, ops), x.lengths)
            x = block.upsample(x, ops)
            spans = [span.scale(block.stride) for span in spans]
            if block.noise is not None and with_noise:
                positions = zip(spans, x.lengths, strict=True)
                noise = torch.cat(
                    [noise_at(layer, span.begin, span.begin + length) for span, length in positions]
                )
                x = RaggedRows(ops.add_scaled(x.rows, block.noise(x, ops).rows, noise), x.lengths)
            for unit in block.units:
                x = unit(x, ops)
        x, spans = _trim_context(x, spans, _KERNEL_MARGIN)
        x = self.last_conv(RaggedRows(self.snake(x.rows, ops), x.lengths), ops)
        x, _ = _trim_context(RaggedRows(ops.soft_cap(x.rows, 1.0), x.lengths), spans, 0)
        return [samples.flatten() for samples in x.split()]


def _trim_context(x: RaggedRows, spans: Sequence[Span], margin: int) -> tuple[RaggedRows, list[Span]]:
    ranges = [span.trimmed_range(margin, length) for span, length in zip(spans, x.lengths, strict=True)]
    trimmed_spans = [
        Span(span.begin + first, span.output_begin, span.end)
        for span, (first, _) in zip(spans, ranges, strict=True)
    ]
    return x.slice(ranges), trimmed_spans


def read_decoder(loader: CodecLoader, config: SnacConfig) -> SnacDecoder:
    """Return the decoder, read from the tensors ``decoder.*``."""
    channels = config.decoder_dim
    first_convs: tuple[Conv1d, ...]
    if config.is_depthwise:
        latent = config.latent_dim
        first_convs = (
            loader.conv1d(
                "decoder.model.0", latent, latent, KERNEL_SIZE, groups=latent, padding=_KERNEL_MARGIN
            ),
            loader.conv1d("decoder.model.1", latent, channels, 1),
        )
    else:
        first_convs = (
            loader.conv1d(
                "decoder.model.0", config.latent_dim, channels, KERNEL_SIZE, padding=_KERNEL_MARGIN
            ),
        )
    margins = _margins(config.decoder_rates)
    blocks = []
    for index, stride in enumerate(config.decoder_rates):
        name, in_channels, channels = (
            f"decoder.model.{len(first_convs) + index}.block",
            channels,
            channels // 2,
        )
        blocks.append(
            UpsamplingBlock(
                loader.snake(f"{name}.0", in_channels),
                loader.upsample(f"{name}.1", in_channels, channels, stride),
                loader.conv1d(f"{name}.2.linear", channels, channels, 1, has_bias=False)
                if config.has_noise
                else None,
                read_units(loader, name, 2 + config.has_noise, channels, is_depthwise=config.is_depthwise),
                stride,
                margins[index],
            )
        )
    last_index = len(first_convs) + len(blocks)
    return SnacDecoder(
        first_convs,
        tuple(blocks),
        loader.snake(f"decoder.model.{last_index}", channels),
        loader.conv1d(f"decoder.model.{last_index + 1}", channels, 1, KERNEL_SIZE, padding=_KERNEL_MARGIN),
        margins[0] + _KERNEL_MARGIN,
    )


def _margins(strides: Sequence[int]) -> list[int]:
    """Return the number of rows of context on each side that the input of each block needs."""
    margins, margin = [], _KERNEL_MARGIN  # the last convolution needs _KERNEL_MARGIN rows
    for stride in reversed(strides):
        # Output row o of an upsampling layer depends on input rows floor(o / stride) and ceil(o / stride).
        margin = -(-(margin + UNITS_MARGIN) // stride) + 1
        margins.append(margin)
    return margins[::-1]
