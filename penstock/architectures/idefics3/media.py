"""Images in prompts of Idefics3 and SmolVLM: numbered tiles, then the whole image."""

from __future__ import annotations

import numpy as np

from penstock.media.family import Arrays, ProcessedImage, VisionFamily

_BORDER_TOKEN, _WHOLE_IMAGE_TOKEN = "<fake_token_around_image>", "<global-img>"


class Idefics3Family(VisionFamily):
    """Images of Idefics3 and SmolVLM: a large image is split into tiles of one size."""

    details = frozenset({"low", "high"})

    @property
    def image_token_id(self) -> int:
        return self.config.integer("image_token_id", 128257, minimum=0)

    def processor_options(self, detail: str) -> dict[str, object]:
        options: dict[str, object] = {"return_row_col_info": True}
        if detail != "auto":
            options["do_image_splitting"] = detail == "high"
        return options

    def to_processed_image(self, outputs: Arrays, size: tuple[int, int]) -> ProcessedImage:
        grid = np.array([outputs["rows"][0][0], outputs["cols"][0][0]])
        return ProcessedImage(outputs["pixel_values"][0], size, {"tiles": grid})

    def expand(self, image: ProcessedImage) -> str:
        rows, columns = image.arguments["tiles"].tolist()
        patch = self.config.section("vision_config").integer("patch_size", 32)
        side = image.pixel_values.shape[-1] // patch // self.config.integer("scale_factor", 2)
        tokens = self.token_text(self.image_token_id) * (side * side)
        image_tokens = f"{_BORDER_TOKEN}{_WHOLE_IMAGE_TOKEN}{tokens}{_BORDER_TOKEN}"
        if not rows:
            return image_tokens
        lines = [
            "".join(f"{_BORDER_TOKEN}<row_{row}_col_{column}>{tokens}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        ]
        return "".join(f"{line}\n" for line in lines) + f"\n{image_tokens}"
