"""`VisionModel`: the additional methods of a `PipelineModel` that reads images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from penstock.pipelines.core import ImageMetadata

if TYPE_CHECKING:
    from penstock.config import HuggingFaceConfig, PipelineConfig


class VisionModel(ABC):
    """A mixin for models that read images.

    The runner calls `encode_images` for images of a step that are not in its encoder cache, and passes the
    rows to the network as ``ModelInputs.input_embeds``.
    """

    max_encoder_rows: ClassVar[int] = 4096
    """Maximum number of rows of all images in one call of `encode_images`. An image with more rows is encoded
    in a separate call.
    """

    @abstractmethod
    def encode_images(self, images: Sequence[ImageMetadata]) -> list[Tensor]:
        """Return the embeddings ``[embedding_rows, W]`` of each image, in the type of the activations.

        The result for an image must not depend on the other images of the call. W is E, the hidden size of
        the decoder. If the decoder adds image rows in n further layers, W is ``(1 + n) E``, and the network
        splits the columns.
        """

    @abstractmethod
    def encoder_rows(self, image: ImageMetadata) -> int:
        """Return the number of vision tower rows of an image: one per patch, plus a class row in CLIP."""

    @classmethod
    @abstractmethod
    def max_image_rows(cls, huggingface_config: HuggingFaceConfig) -> int:
        """Return the largest number of rows of one image in an encoder call, for the memory plan."""

    @classmethod
    @abstractmethod
    def encoder_row_size(cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig) -> int:
        """Return the size in bytes of the vision tower's activations for one row."""

    @classmethod
    def estimate_encoder_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """Return the size in bytes of the activations of the largest `encode_images` call and of the graphs.

        Graphs are captured for calls of up to ``max_encoder_rows`` rows. They hold at most the activations of
        one call.
        """
        rows = max(cls.max_encoder_rows, cls.max_image_rows(huggingface_config)) + cls.max_encoder_rows
        return rows * cls.encoder_row_size(pipeline_config, huggingface_config)
