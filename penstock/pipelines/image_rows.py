"""`ImageRows`: computes the image embeddings of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.architectures.vision import VisionModel
from penstock.host.heartbeat import beat
from penstock.kernels import upload
from penstock.pipelines.core import ImageMetadata, TextAndVisionContext, TextContext
from penstock.pipelines.encoder_cache import EncoderCache


class ImageRows:
    """Encodes the images of a step, and returns the embeddings that replace their placeholders.

    An image is encoded in each step that computes some of its tokens, unless the encoder cache has its rows.
    The rows of an image with a digest are cached for later chunks of the prompt and for other requests. An
    image is not encoded if the prefix cache contains the blocks of its span.

    Args:
        model: encodes images.
        cache: caches the rows of encoded images.
        device: the device of the step.
    """

    def __init__(self, model: VisionModel, cache: EncoderCache, device: torch.device) -> None:
        self._model = model
        self.cache = cache
        self._device = device

    def embeddings(
        self, contexts: Sequence[TextContext], row_counts: Sequence[int]
    ) -> tuple[Tensor, Tensor] | None:
        """Return the indices ``[P]`` of the step's placeholder rows, and their embeddings ``[P, W]``.

        Args:
            contexts: the batch.
            row_counts: ``[B]``: the number of rows of each context in the step.

        Returns:
            None if no row is a placeholder.
        """
        window_images: list[tuple[int, TextAndVisionContext, ImageMetadata]] = []
        first_row = 0
        for context, count in zip(contexts, row_counts, strict=True):
            if isinstance(context, TextAndVisionContext) and context.images:
                window_images += [(first_row, context, image) for image in context.next_images_in_window]
            first_row += count
        if not window_images:
            return None
        image_embeddings = self._image_embeddings([image for _, _, image in window_images])
        rows: list[np.ndarray] = []
        row_embeddings: list[Tensor] = []
        for (first_row, context, image), image_rows in zip(window_images, image_embeddings, strict=True):
            indices = context.placeholders(image)
            start, stop = np.searchsorted(indices, [context.start_idx, context.active_idx])
            rows.append(indices[start:stop].astype(np.int64) - context.start_idx + first_row)
            row_embeddings.append(image_rows[start:stop])
        all_rows = np.concatenate(rows)
        if not len(all_rows):  # the tokens of images in this step are separators, not placeholders
            return None
        return upload(all_rows, self._device), torch.cat(row_embeddings)

    def _image_embeddings(self, images: Sequence[ImageMetadata]) -> list[Tensor]:
        """Return the rows of each image, from the cache or from the encoder. Encodes equal images once."""
        cached_rows = [self.cache.get(image.image_hash) for image in images]
        missing_images: dict[bytes | int, ImageMetadata] = {}
        for image, rows in zip(images, cached_rows, strict=True):
            if rows is None:
                missing_images.setdefault(_image_key(image), image)
        computed_rows: dict[bytes | int, Tensor] = {}
        for batch in self._batches(list(missing_images.values())):
            with torch.inference_mode():
                results = self._model.encode_images(batch)
            beat()
            for image, rows in zip(batch, results, strict=True):
                assert len(rows) == image.embedding_rows, (
                    f"the encoder returned {len(rows)} rows for an image with {image.embedding_rows}"
                )
                computed_rows[_image_key(image)] = rows
                self.cache.put(image.image_hash, rows)
        return [
            computed_rows[_image_key(image)] if rows is None else rows
            for image, rows in zip(images, cached_rows, strict=True)
        ]

    def _batches(self, images: Sequence[ImageMetadata]) -> list[list[ImageMetadata]]:
        """Divide images into batches of up to ``max_encoder_rows`` rows. A larger image has its own batch."""
        batches: list[list[ImageMetadata]] = []
        num_rows_left = 0
        for image in images:
            num_rows = self._model.encoder_rows(image)
            if not batches or num_rows > num_rows_left:
                batches.append([])
                num_rows_left = self._model.max_encoder_rows
            batches[-1].append(image)
            num_rows_left -= num_rows
        return batches


def _image_key(image: ImageMetadata) -> bytes | int:
    """Return a key that identifies an image within a step: its digest, or its object id without a digest."""
    return id(image) if image.image_hash is None else image.image_hash
