"""`TextAndVisionContext`: the context of a text request with images."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy.typing as npt

from penstock.errors import UnsupportedFeatureError
from penstock.pipelines.core.context import TextContext


class TextAndVisionContext(TextContext, kw_only=True, tag=True, omit_defaults=True):
    """A text request with an image.

    ``pixel_values`` are kept: chunked prompts and preempted contexts need them again.
    """

    pixel_values: tuple[npt.NDArray[Any], ...] = ()
    """The image as returned by the model's processor."""
    extra_model_args: dict[str, npt.NDArray[Any]] = msgspec.field(default_factory=dict)
    """Other outputs of the processor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.pixel_values) > 1:
            raise UnsupportedFeatureError(
                "more than one image", f"only one image supported in a context, got {len(self.pixel_values)}"
            )
