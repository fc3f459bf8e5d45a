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
    """Other outputs that `VisionFamily.expand`, the encoder or the decoder reads."""
    digest: bytes | None = None
    """The digest of the outputs, see `penstock.pipelines.core.image_digest`; the tokenizer sets it."""

    @property
    def num_bytes(self) -> int:
        """The bytes of all arrays."""
        return self.pixel_values.nbytes + sum(one.nbytes for one in self.arguments.values())


class VisionFamily(ABC):
    """The representation of images in the prompts of a model family. The module of a subclass loads no torch.

    The chat template, or the user's prompt, has one ``placeholder`` text for each image. It is replaced by
    the text that `expand` returns, and the text is encoded. The embeddings of its tokens with the id
    `image_token_id` are replaced by the rows of the vision encoder.

    Args:
        config: the checkpoint's ``config.json``.
        processor_config: ``processor_config.json`` and ``preprocessor_config.json``, merged.
        token_text: returns the text of a token.
    """

    is_bidirectional: ClassVar[bool] = False
    """Whether the tokens between the first and the last image token of an image attend to each other in both
    directions."""
    details: ClassVar[frozenset[str]] = frozenset()
    """The values of ``detail``, besides ``auto``, that `processor_options` supports."""

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
    @abstractmethod
    def image_token_id(self) -> int:
        """The id of the tokens whose embeddings the rows of the encoder replace."""

    @property
    def placeholder(self) -> str:
        """The text of an image in a rendered prompt; by default that of `image_token_id`."""
        return self.token_text(self.image_token_id)

    @abstractmethod
    def expand(self, image: ProcessedImage) -> str:
        """Return the text that replaces the placeholder of an image.

        It contains the text of `image_token_id` once for each row of the encoder.
        """

    def processor_options(self, detail: str) -> dict[str, object]:
        """Return keyword arguments for a call of the image processor.

        Args:
            detail: the requested resolution: ``auto`` or one of `details`.
        """
        return {}

    def processed(self, outputs: Arrays, size: tuple[int, int]) -> ProcessedImage:
        """Return the image from the outputs of the image processor for a list of one image.

        The default takes ``pixel_values[0]`` and drops the other outputs.
        """
        return ProcessedImage(outputs["pixel_values"][0], size)
