"""`ResidualUnit`: the residual unit of SNAC's decoder and encoder."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.codecs.layers import CodecLoader, Conv1d, RaggedRows, Snake
from penstock.kernels import Ops

KERNEL_SIZE = 7
DILATIONS = (1, 3, 9)
UNITS_MARGIN = KERNEL_SIZE // 2 * sum(DILATIONS)
"""Number of rows on each side on which the output of three consecutive units depends."""


@dataclass(frozen=True, slots=True)
class ResidualUnit:
    """A dilated and a pointwise convolution with a residual connection."""

    first_snake: Snake
    dilated_conv: Conv1d
    second_snake: Snake
    pointwise_conv: Conv1d

    def __call__(self, x: RaggedRows, ops: Ops) -> RaggedRows:
        y = self.dilated_conv(RaggedRows(self.first_snake(x.rows, ops), x.lengths), ops)
        y = self.pointwise_conv(RaggedRows(self.second_snake(y.rows, ops), x.lengths), ops)
        return RaggedRows(ops.add(x.rows, y.rows), x.lengths)


def read_units(
    loader: CodecLoader, prefix: str, first_index: int, channels: int, *, is_depthwise: bool
) -> tuple[ResidualUnit, ...]:
    """Return the units ``{prefix}.{i}``, with i from ``first_index`` to ``first_index + 2``."""
    units = []
    for index, dilation in enumerate(DILATIONS):
        name = f"{prefix}.{first_index + index}.block"
        groups, padding = channels if is_depthwise else 1, KERNEL_SIZE // 2 * dilation
        dilated_conv = loader.conv1d(
            f"{name}.1", channels, channels, KERNEL_SIZE, padding=padding, dilation=dilation, groups=groups
        )
        pointwise_conv = loader.conv1d(f"{name}.3", channels, channels, 1)
        snakes = loader.snake(f"{name}.0", channels), loader.snake(f"{name}.2", channels)
        units.append(ResidualUnit(snakes[0], dilated_conv, snakes[1], pointwise_conv))
    return tuple(units)
