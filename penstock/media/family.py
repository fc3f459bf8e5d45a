"""`VisionFamily`: the representation of images in the prompts of a model family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig

Arrays = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """The outputs of an image processor for one image."""

    pixel_values: npt.NDArray[np.generic]
    """The pixels in the family's layout, without a batch dimension."""
    size: tuple[int, int]
    """Width and height of the image before it was processed."""
    arguments: dict[str, npt.NDArray[np.generic]] = field(default_factory=dict)
    """Other outputs that `VisionFamily.expand`, the vision encoder or the decoder needs."""
    digest: bytes | None = None
    """The digest of the outputs, set by the tokenizer; see `penstock.pipelines.core.image_digest`."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all arrays."""
        return self.pixel_values.nbytes + sum(array.nbytes for array in self.arguments.values())


class VisionFamily(ABC):
    """The representation of images in the prompts of a model family.

    The rendered chat template, or the user's prompt, contains the text `placeholder` for each image. The
    tokenizer replaces the placeholder by the text that `expand` returns, and encodes the whole text. The
    model replaces the embeddings of the tokens with the id `image_token_id` by the rows of the vision
    encoder. The module of a subclass must not import torch.

    Args:
        config: the checkpoint's ``config.json``.
        processor_config: ``processor_config.json`` and ``preprocessor_config.json``, merged.
        token_text: returns the text of a token id.
    """

    details: ClassVar[frozenset[str]] = frozenset()
    """The values of ``detail`` that `processor_options` supports, in addition to ``auto``."""

    def __init__(
        self,
        config: HuggingFaceConfig,
        processor_config: Mapping[str, object],
        token_text: Callable[[int], str],
    ) -> None:
        self.config = config
        self.processor_config = processor_config
        self.token_text = token_text

    @property
    def is_bidirectional(self) -> bool:
        """Whether the tokens from the first to the last image token of an image attend to each other in both
        directions."""
        return False

    @property
    @abstractmethod
    def image_token_id(self) -> int:
        """The id of the tokens whose embeddings are replaced by the rows of the vision encoder."""

    @property
    def placeholder(self) -> str:
        """The text that stands for an image in a rendered prompt; by default the text of `image_token_id`."""
        return self.token_text(self.image_token_id)

    @abstractmethod
    def expand(self, image: ProcessedImage) -> str:
        """Return the text that replaces the placeholder of an image.

        It contains the text of `image_token_id` once for each row of the vision encoder.
        """

    def processor_options(self, detail: str) -> dict[str, object]:
        """Return keyword arguments for the call of the image processor.

        Args:
            detail: the requested resolution, ``auto`` or one of `details`.
        """
        return {}

    def to_processed_image(self, outputs: Arrays, size: tuple[int, int]) -> ProcessedImage:
        """Return the `ProcessedImage` for the outputs of the image processor.

        The outputs have a batch dimension of 1. This implementation uses only ``pixel_values[0]``.
        """
        return ProcessedImage(outputs["pixel_values"][0], size)
