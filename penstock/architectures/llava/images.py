"""`LlavaImages`: the tokens of an image in a prompt of LLaVA."""

from __future__ import annotations

from penstock.config import HuggingFaceConfig
from penstock.errors import CheckpointError
from penstock.media.family import ProcessedImage, VisionFamily

CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"


def vision_config(config: HuggingFaceConfig) -> HuggingFaceConfig:
    """Return the configuration of the vision tower, with the default values of transformers."""
    section = config.section("vision_config").to_dict()
    return HuggingFaceConfig({**_VISION_DEFAULTS, **section}, "config.json: vision_config")


def has_class_row(config: HuggingFaceConfig) -> bool:
    """Return whether the vision tower puts a row for the class token before the patches, as CLIP does."""
    return vision_config(config).text("model_type") == CLIP


def drops_first_row(config: HuggingFaceConfig) -> bool:
    """Return whether the first output row of the vision tower is dropped.

    Raises:
        CheckpointError: ``vision_feature_select_strategy`` is neither "default" nor "full".
    """
    strategy = config.text("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise CheckpointError(
            "config.json", f"vision_feature_select_strategy must be default or full, was {strategy!r}"
        )
    return strategy == "default"


class LlavaImages(VisionFamily):
    """Images of LLaVA: one token for each output row of the vision tower."""

    @property
    def image_token_id(self) -> int:
        key = "image_token_index" if "image_token_index" in self.config else "image_token_id"
        return self.config.integer(key, 32000, minimum=0)

    def expand(self, image: ProcessedImage) -> str:
        tower = vision_config(self.config)
        size, patch = tower.integer("image_size"), tower.integer("patch_size")
        height, width = image.pixel_values.shape[-2:]
        if (height, width) != (size, size):
            raise CheckpointError(
                "preprocessor_config.json",
                f"makes images of {width} x {height} pixels, but the vision tower reads {size} x {size}",
            )
        count = (size // patch) ** 2 + has_class_row(self.config) - drops_first_row(self.config)
        return self.token_text(self.image_token_id) * count


_VISION_DEFAULTS: dict[str, object] = {
    "model_type": CLIP,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
"""The defaults of keys that ``vision_config`` does not contain."""
