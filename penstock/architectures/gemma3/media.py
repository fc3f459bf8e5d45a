"""Images in prompts of Gemma 3: a fixed number of placeholders between a begin token and an end token."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.config import HuggingFaceConfig
from penstock.errors import ConfigError
from penstock.media.family import ProcessedImage, VisionFamily


class Gemma3Family(VisionFamily):
    """Images of Gemma 3. The tokens of an image attend to each other in both directions."""

    def __init__(
        self,
        config: HuggingFaceConfig,
        processor_config: Mapping[str, object],
        token_text: Callable[[int], str],
    ) -> None:
        super().__init__(config, processor_config, token_text)
        if processor_config.get("do_pan_and_scan"):
            raise ConfigError(
                "do_pan_and_scan", "is true, but crops of an image are not supported: set it to false"
            )

    @property
    def is_bidirectional(self) -> bool:
        return True

    @property
    def image_token_id(self) -> int:
        return self.config.integer("image_token_index", 262144, minimum=0)

    @property
    def placeholder(self) -> str:
        return self.token_text(self.config.integer("boi_token_index", 255999, minimum=0))

    def expand(self, image: ProcessedImage) -> str:
        end = self.token_text(self.config.integer("eoi_token_index", 256000, minimum=0))
        tokens = self.token_text(self.image_token_id) * self.config.integer("mm_tokens_per_image", 256)
        return f"\n\n{self.placeholder}{tokens}{end}\n\n"
