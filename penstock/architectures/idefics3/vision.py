"""The vision encoder of Idefics3 and SmolVLM (Laurençon et al. 2024, arXiv:2408.12637).

The encoder is a SigLIP model with a pixel shuffle, which concatenates the rows of a square of patches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels import Ops
from penstock.nn import Linear, Loader
from penstock.nn.vision import (
    EncoderRunner,
    VisionSizes,
    VisionTower,
    flatten_patches,
    image_step,
    image_step_tensors,
    with_step_tensors,
)

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig
    from penstock.pipelines.core import ImageMetadata

MAX_ROWS = 4096
"""Maximum number of rows that the vision tower computes in one call, unless a single tile has more rows."""


@dataclass(frozen=True, slots=True)
class Idefics3Vision:
    """The vision tower, and the projection of squares of patches to decoder embeddings."""

    tower: VisionTower
    projection: Linear  # [s^2 E] -> [D], D: the hidden size of the decoder
    scale: int  # s: patches per decoder embedding, in each direction
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def load(cls, load: Loader, config: HuggingFaceConfig, sizes: VisionSizes, hidden: int) -> Idefics3Vision:
        """Read the encoder of a checkpoint; ``hidden`` is the hidden size of the decoder.

        Raises:
            ConfigError: ``scale_factor`` does not divide the number of patches per side of an image.
        """
        scale = config.integer("scale_factor", 2)
        if sizes.patches_per_side % scale:
            raise ConfigError(
                "scale_factor",
                f"{scale} does not divide the {sizes.patches_per_side} patches per side of an image",
            )
        return cls(
            VisionTower.load(load, "vision_model", sizes),
            load.linear("connector.modality_projection.proj", hidden, sizes.hidden * scale * scale),
            scale,
            load.device,
            load.dtype,
        )

    def __call__(self, images: Sequence[ImageMetadata], run: EncoderRunner) -> list[Tensor]:
        """Return the decoder embeddings ``[embedding_rows, D]`` of each image, from batches of tiles."""
        return [torch.cat(list(self._encode(image, run))) for image in images]

    def _encode(self, image: ImageMetadata, run: EncoderRunner) -> Iterator[Tensor]:
        """Yield the decoder embeddings ``[n, D]`` of each batch of an image's tiles."""
        pixels = torch.from_numpy(image.pixel_values).to(self.device, self.dtype)  # [N, C, h, w]
        patch_count = num_patches(image, self.tower.sizes.patch_size)
        for tiles in torch.split(pixels, max(1, MAX_ROWS * len(pixels) // patch_count)):
            yield self.encode_tiles(tiles, run)

    def encode_tiles(self, pixels: Tensor, run: EncoderRunner) -> Tensor:
        """Return the decoder embeddings ``[N h w / (p s)^2, D]`` of N tiles with patches of size p.

        Args:
            pixels: ``[N, C, h, w]``.
            run: runs the encoder's forward.
        """
        num_tiles, _, height, width = pixels.shape
        patch, scale = self.tower.sizes.patch_size, self.scale
        rows, columns = height // patch, width // patch
        step = image_step(run.ops, [rows * columns] * num_tiles, pixels.device)
        # The order of patches: all patches of the first square, then all patches of the second, and so on.
        order = torch.arange(num_tiles * rows * columns, device=pixels.device)
        order = order.view(num_tiles, rows // scale, scale, columns // scale, scale).transpose(2, 3).flatten()
        inputs = {
            "patches": flatten_patches(pixels, patch),
            "table_rows": tile_positions(rows, columns, self.tower.sizes.patches_per_side)
            .to(pixels.device)
            .repeat(num_tiles),
            "order": order,
            **image_step_tensors(step),
        }

        def forward(ops: Ops, tensors: Mapping[str, Tensor]) -> Iterable[Tensor]:
            forward_step = with_step_tensors(step, ops, tensors)
            x = self.tower(tensors["patches"], tensors["table_rows"], forward_step)
            squares = ops.take_rows(x, tensors["order"]).view(-1, x.shape[1] * scale * scale)
            return [self.projection(squares, forward_step)]

        return run((id(self), num_tiles, rows, columns), inputs, forward)[0]


def num_patches(image: ImageMetadata, patch_size: int) -> int:
    """Return the number of patches in all tiles of an image."""
    count, _, height, width = image.pixel_values.shape
    return int(count * (height // patch_size) * (width // patch_size))


def tile_positions(rows: int, columns: int, side: int) -> Tensor:
    """Return, for each patch of a grid, its row in the table of ``side * side`` learned positions."""
    return (_table_indices(rows, side)[:, None] * side + _table_indices(columns, side)).flatten()


def _table_indices(count: int, side: int) -> Tensor:
    """Return the table index of each of ``count`` patches along one direction of an image.

    The patches are evenly spaced points in [0, 1). The index is the number of the interval that contains the
    point, out of ``side`` equal intervals.
    """
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    return torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / count), bounds, right=True)
