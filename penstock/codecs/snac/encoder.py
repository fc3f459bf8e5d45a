"""The encoder of SNAC: converts samples to latent rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.codecs.layers import CodecLoader, Conv1d, RaggedRows, Snake
from penstock.codecs.snac.config import SnacConfig
from penstock.codecs.snac.residual import KERNEL_SIZE, ResidualUnit, read_units
from penstock.kernels import Ops


@dataclass(frozen=True, slots=True)
class DownsamplingBlock:
    """Three residual units, then a strided convolution that lowers the rate."""

    units: tuple[ResidualUnit, ...]
    snake: Snake
    downsample: Conv1d


@dataclass(frozen=True, slots=True)
class SnacEncoder:
    """Converts samples to latent rows."""

    first_conv: Conv1d
    blocks: tuple[DownsamplingBlock, ...]
    last_conv: Conv1d

    def __call__(self, samples: Tensor, ops: Ops) -> Tensor:
        """``samples [S] -> [S / hop, latent_dim]``. S must be a multiple of hop."""
        x = self.first_conv(RaggedRows(samples[:, None], [len(samples)]), ops)
        for block in self.blocks:
            for unit in block.units:
                x = unit(x, ops)
            x = block.downsample(RaggedRows(block.snake(x.rows, ops), x.lengths), ops)
        return self.last_conv(x, ops).rows


def read_encoder(loader: CodecLoader, config: SnacConfig) -> SnacEncoder:
    """Read the tensors ``encoder.*``."""
    channels, padding = config.encoder_dim, KERNEL_SIZE // 2
    first_conv = loader.conv1d("encoder.block.0", 1, channels, KERNEL_SIZE, padding=padding)
    blocks = []
    for index, stride in enumerate(config.encoder_rates):
        name = f"encoder.block.{index + 1}.block"
        units = read_units(loader, name, 0, channels, is_depthwise=config.is_depthwise)
        snake, in_channels, channels = loader.snake(f"{name}.3", channels), channels, 2 * channels
        downsample = loader.conv1d(
            f"{name}.4", in_channels, channels, 2 * stride, stride=stride, padding=-(-stride // 2)
        )
        blocks.append(DownsamplingBlock(units, snake, downsample))
    groups = channels if config.is_depthwise else 1
    last_name = f"encoder.block.{len(blocks) + 1}"
    return SnacEncoder(
        first_conv,
        tuple(blocks),
        loader.conv1d(last_name, channels, config.latent_dim, KERNEL_SIZE, padding=padding, groups=groups),
    )
