"""Images in prompts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: one token for each square of merged patches."""

from __future__ import annotations

from math import prod

import numpy as np

from penstock.errors import InputError
from penstock.media.family import Arrays, ProcessedImage, VisionFamily


class QwenVisionFamily(VisionFamily):
    """Images of any size. The chat template puts the placeholder between a begin and an end token."""

    @property
    def image_token_id(self) -> int:
        return self.config.integer("image_token_id", 151655, minimum=0)

    def to_processed_image(self, outputs: Arrays, size: tuple[int, int]) -> ProcessedImage:
        grid = np.asarray(outputs["image_grid_thw"][0], dtype=np.int64)
        if grid[0] != 1:
            raise InputError(f"an image has {grid[0]} frames: this model family reads images, not videos")
        return ProcessedImage(outputs["pixel_values"], size, {"image_grid_thw": grid})

    def expand(self, image: ProcessedImage) -> str:
        merge = self.config.section("vision_config").integer("spatial_merge_size", 2)
        count = int(prod(image.arguments["image_grid_thw"].tolist())) // merge**2
        return self.token_text(self.image_token_id) * count
