"""The vision encoder of Gemma 3 (arXiv:2503.19786): a SigLIP encoder, average pooling and a projection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.kernels import Ops
from penstock.nn import Linear, Loader, RMSNorm
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

_PROJECTION = "multi_modal_projector.mm_input_projection_weight"


@dataclass(frozen=True, slots=True)
class Gemma3Vision:
    """The vision tower, average pooling of squares of patches, and the projection to decoder embeddings."""

    tower: VisionTower
    norm: RMSNorm
    projection: Linear  # [E] -> [D], D: the hidden size of the decoder
    pooled_side: int  # embeddings per side of an image, after pooling
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def load(cls, load: Loader, config: HuggingFaceConfig, sizes: VisionSizes, hidden: int) -> Gemma3Vision:
        """Read the encoder of a checkpoint; ``hidden`` is the hidden size of the decoder.

        Raises:
            ConfigError: pooling cannot divide the patches of an image into ``mm_tokens_per_image`` squares.
        """
        num_tokens = config.integer("mm_tokens_per_image", 256)
        pooled_side = isqrt(num_tokens)
        if pooled_side**2 != num_tokens or sizes.patches_per_side % pooled_side:
            raise ConfigError(
                "mm_tokens_per_image",
                f"{num_tokens} must be the square of a divisor of {sizes.patches_per_side}, the patches per "
                "side of an image",
            )
        weight = load.source.tensor(_PROJECTION, (sizes.hidden, hidden))
        return cls(
            VisionTower.load(load, "vision_tower", sizes),
            load.norm("multi_modal_projector.mm_soft_emb_norm", sizes.hidden, sizes.norm_eps, offset=1.0),
            load.pack(weight.T.contiguous(), {_PROJECTION: hidden}),
            pooled_side,
            load.device,
            load.dtype,
        )

    def __call__(self, images: Sequence[ImageMetadata], run: EncoderRunner) -> list[Tensor]:
        """Return the decoder embeddings ``[pooled_side^2, D]`` of each image."""
        sizes, num_images, side = self.tower.sizes, len(images), self.pooled_side
        pixels = torch.stack([torch.from_numpy(image.pixel_values) for image in images])
        patches = flatten_patches(pixels.to(self.device, self.dtype), sizes.patch_size)
        step = image_step(run.ops, [sizes.patches_per_side**2] * num_images, self.device)

        def forward(ops: Ops, tensors: Mapping[str, Tensor]) -> Iterable[Tensor]:
            forward_step = with_step_tensors(step, ops, tensors)
            return [self.tower(tensors["patches"], forward_step.positions, forward_step)]

        [x] = run((id(self), num_images), {"patches": patches, **image_step_tensors(step)}, forward)
        squares = x.view(
            num_images, side, sizes.patches_per_side // side, side, sizes.patches_per_side // side, -1
        )
        pooled = squares.float().mean((2, 4)).to(x.dtype).view(num_images * side * side, -1)
        return list(self.projection(self.norm(pooled, step), step).view(num_images, side * side, -1))
