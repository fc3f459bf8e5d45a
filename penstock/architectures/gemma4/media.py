"""Images in prompts of Gemma 4: one token for each square of patches, between a begin and an end token."""

from __future__ import annotations

import numpy as np

from penstock.media.family import Arrays, ProcessedImage, VisionFamily

POSITIONS = "image_position_ids"
"""The name of the array with the column and row of each patch."""
MAX_TOKENS = 1120
"""The largest number of tokens of an image, for ``detail: high``."""
_TOKENS_BY_DETAIL = {"low": 70, "high": MAX_TOKENS}


class Gemma4Family(VisionFamily):
    """Images of Gemma 4, of any aspect ratio. A higher ``detail`` gives an image more tokens."""

    details = frozenset(_TOKENS_BY_DETAIL)

    @property
    def is_bidirectional(self) -> bool:
        return self.config.section("text_config").get("use_bidirectional_attention") == "vision"

    @property
    def image_token_id(self) -> int:
        return self.config.integer("image_token_id", 258_880, minimum=0)

    def processor_options(self, detail: str) -> dict[str, object]:
        return {"max_soft_tokens": _TOKENS_BY_DETAIL[detail]} if detail in _TOKENS_BY_DETAIL else {}

    def to_processed_image(self, outputs: Arrays, size: tuple[int, int]) -> ProcessedImage:
        """Return the patches and their positions, without the padding that the processor appends."""
        positions = np.asarray(outputs[POSITIONS][0], dtype=np.int64)
        is_patch = positions[:, 0] >= 0
        pixels = outputs["pixel_values"][0][is_patch]
        return ProcessedImage(pixels, size, {POSITIONS: positions[is_patch]})

    def expand(self, image: ProcessedImage) -> str:
        begin = self.token_text(self.config.integer("boi_token_id", 255_999, minimum=0))
        end = self.token_text(self.config.integer("eoi_token_id", 258_882, minimum=0))
        pooling = self.config.section("vision_config").integer("pooling_kernel_size", 3)
        count = len(image.pixel_values) // pooling**2
        return f"{begin}{self.token_text(self.image_token_id) * count}{end}"
