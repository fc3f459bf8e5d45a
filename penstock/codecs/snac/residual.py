"""The residual unit that decoder and encoder share."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.codecs.layers import CodecLoader, Conv1d, RaggedRows, Snake
from penstock.kernels import Ops

KERNEL_SIZE = 7
DILATIONS = (1, 3, 9)
REACH = KERNEL_SIZE // 2 * sum(DILATIONS)
"""Rows to each side on which the output of three consecutive units depends."""


@dataclass(frozen=True, slots=True)
class ResidualUnit:
    """A dilated and a pointwise convolution with a residual connection."""

    first: Snake
    wide: Conv1d
    second: Snake
    pointwise: Conv1d

    def __call__(self, x: RaggedRows, ops: Ops) -> RaggedRows:
        y = self.wide(RaggedRows(self.first(x.rows, ops), x.lengths), ops)
        y = self.pointwise(RaggedRows(self.second(y.rows, ops), x.lengths), ops)
        return RaggedRows(ops.add(x.rows, y.rows), x.lengths)


def read_units(
    loader: CodecLoader, prefix: str, first: int, channels: int, *, is_depthwise: bool
) -> tuple[ResidualUnit, ...]:
    """Return the units ``prefix.first`` and the next two."""
    units = []
    for index, dilation in enumerate(DILATIONS):
        name = f"{prefix}.{first + index}.block"
        groups, padding = channels if is_depthwise else 1, KERNEL_SIZE // 2 * dilation
        wide = loader.conv1d(
            f"{name}.1", channels, channels, KERNEL_SIZE, padding=padding, dilation=dilation, groups=groups
        )
        pointwise = loader.conv1d(f"{name}.3", channels, channels, 1)
        snakes = loader.snake(f"{name}.0", channels), loader.snake(f"{name}.2", channels)
        units.append(ResidualUnit(snakes[0], wide, snakes[1], pointwise))
    return tuple(units)
