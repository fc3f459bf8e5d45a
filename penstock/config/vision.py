"""`VisionConfig`: images in prompts."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from penstock.config.settings import COUNT, NUM_BYTES, Rule, check_fields, setting


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Limits, memory and processes for images in prompts.

    Raises:
        ConfigError: a field has an invalid value.
    """

    encoder_cache_memory: int | None = setting(
        None,
        NUM_BYTES,
        "Size of the cache of encoded images, in bytes; by default 5 % of the free memory, at most 256 MiB.",
    )
    max_images: int = setting(
        32, COUNT, "Maximum number of images of a request.", flat_name="max_images_per_request"
    )
    max_pixels: int = setting(
        64 * 2**20,
        COUNT,
        "Maximum width times height of an image; a larger image is refused before it is decoded.",
        flat_name="max_image_pixels",
    )
    max_bytes: int = setting(
        32 * 2**20, NUM_BYTES, "Maximum size of an encoded image, in bytes.", flat_name="max_image_bytes"
    )
    processes: int = setting(
        1, COUNT, "Number of processes that prepare images for the model.", flat_name="image_processes"
    )
    timeout: float = setting(
        30.0,
        Rule("a number of seconds above 0", lambda value: isfinite(value) and value > 0),
        "Time limit in seconds, applied separately to fetching an image and to preparing it.",
        flat_name="image_timeout",
    )

    def __post_init__(self) -> None:
        check_fields(self)
