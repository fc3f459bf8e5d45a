"""`TextAndVisionTokenizer`: the tokenizer of a model that reads images."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from penstock.config import HuggingFaceConfig, VisionConfig
from penstock.errors import CheckpointError, InputError, UnsupportedFeatureError
from penstock.media.family import ProcessedImage, VisionFamily
from penstock.media.processor import ImageProcessor, LocalProcessor, ProcessorPool, read_processor_config
from penstock.pipelines.core import (
    ImageMetadata,
    TextAndVisionContext,
    TextContext,
    TokenGeneratorRequest,
    image_digest,
)
from penstock.text.special_tokens import RenderedPrompt
from penstock.text.tokenizer import TextTokenizer, TokenizerOptions

_CACHE_BYTES = 64 * 2**20
"""Maximum size in bytes of the cache of prepared images. Later requests of a conversation repeat its images.
"""


@dataclass(frozen=True, kw_only=True)
class _PreparedRequest(TokenGeneratorRequest):
    """A request whose images have been prepared."""

    prepared_images: tuple[ProcessedImage, ...] = ()


class TextAndVisionTokenizer(TextTokenizer):
    """Converts requests with images to contexts. The tokenizer prepares the images and inserts their tokens.

    Args:
        checkpoint: the folder of the checkpoint.
        family: the representation of images in prompts.
        vision: limits for images.
        **text_options: the keyword arguments of `TextTokenizer`.
    """

    reads_images = True

    def __init__(
        self,
        checkpoint: Path,
        family: type[VisionFamily],
        vision: VisionConfig,
        **text_options: Unpack[TokenizerOptions],
    ) -> None:
        super().__init__(checkpoint, **text_options)
        if self._chat_template is not None:
            self._chat_template.reads_images = True
        config = HuggingFaceConfig.from_checkpoint(checkpoint)
        self._family = family(config, read_processor_config(checkpoint), self._token_text)
        self._vision = vision
        self._checkpoint = checkpoint
        self._processor: ImageProcessor = LocalProcessor(checkpoint)
        self._cache = _ImageCache(_CACHE_BYTES)

    @property
    def image_details(self) -> frozenset[str]:
        """The values of ``detail`` that the model supports, in addition to ``auto``."""
        return self._family.details

    @property
    def image_placeholder(self) -> str:
        """The text that stands for an image in a prompt."""
        return self._family.placeholder

    def use_processes(self) -> None:
        """Start separate processes, which prepare all further images."""
        self._processor = ProcessorPool(self._checkpoint, self._vision.processes, self._vision.timeout)
        self._processor.start()

    def close(self) -> None:
        self._processor.close()

    def build_context(self, request: TokenGeneratorRequest, *, stops_as_tokens: bool = True) -> TextContext:
        return super().build_context(self._prepare_images(request), stops_as_tokens=stops_as_tokens)

    def _prompt(
        self, request: TokenGeneratorRequest, *, is_limited: bool = False
    ) -> tuple[str | None, np.ndarray]:
        return super()._prompt(self._prepare_images(request), is_limited=is_limited)

    # -- Images -----------------------------------------------------------------------------------------

    def _check_images(self, request: TokenGeneratorRequest) -> None:
        images = request.images or ()
        if images and request.prompt is not None and not isinstance(request.prompt, str):
            raise UnsupportedFeatureError("images with token ids", "use a text prompt or messages")
        if len(images) > self._vision.max_images:
            raise InputError(
                f"the request has {len(images)} images, but the limit is {self._vision.max_images} "
                "(--max-images-per-request)"
            )

    def _prepare_images(self, request: TokenGeneratorRequest) -> TokenGeneratorRequest:
        """Prepare the images of a request. Return a request with the prepared images."""
        if isinstance(request, _PreparedRequest) or not request.images:
            return request
        self._check_images(request)
        details = request.image_details or ["auto"] * len(request.images)
        prepared_images = tuple(map(self._prepare_image, request.images, details))
        values = {field.name: getattr(request, field.name) for field in fields(TokenGeneratorRequest)}
        return _PreparedRequest(**values, prepared_images=prepared_images)

    def _prepare_image(self, data: bytes, detail: str) -> ProcessedImage:
        if detail != "auto" and detail not in self._family.details:
            supported_details = ", ".join(sorted({"auto", *self._family.details}))
            raise UnsupportedFeatureError(f"detail {detail!r}", f"this model supports {supported_details}")
        if len(data) > self._vision.max_bytes:
            raise InputError(
                f"the image has {len(data)} bytes, but the limit is {self._vision.max_bytes} "
                "(--max-image-bytes): send a smaller image"
            )
        key = blake2b(data, digest_size=32, person=detail.encode()[:16]).digest()
        image = self._cache.get(key)
        if image is None:
            options = self._family.processor_options(detail)
            outputs, size = self._processor.process(data, options, self._vision.max_pixels)
            image = self._family.to_processed_image(outputs, size)
            digest = image_digest(image.pixel_values, image.arguments)
            image = replace(image, digest=digest)
            self._cache.put(key, image)
        return image

    def _expand_placeholders(
        self, rendered: RenderedPrompt, request: TokenGeneratorRequest
    ) -> RenderedPrompt:
        """Return the prompt with the placeholder of each image replaced by the text of the image.

        Placeholders in the text of messages are not replaced.

        Raises:
            InputError: the number of placeholders differs from the number of images.
        """
        images = request.prepared_images if isinstance(request, _PreparedRequest) else ()
        placeholder = self._family.placeholder
        starts = _occurrences(rendered.text, placeholder)
        placeholder_starts = [
            start for start in starts if not rendered.is_from_message(start, start + len(placeholder))
        ]
        if len(placeholder_starts) != len(images):
            subject = "the rendered chat template" if request.messages is not None else "the prompt"
            raise InputError(
                f"{subject} has {len(placeholder_starts)} placeholders {placeholder!r}, but the request has "
                f"{len(images)} images"
            )
        if not images:
            return rendered
        texts, boundaries, end = [], list(rendered.boundaries), 0
        for start, image in zip(placeholder_starts, images, strict=True):
            texts += [rendered.text[end:start], self._family.expand(image)]
            end = start + len(placeholder)
        texts.append(rendered.text[end:])
        shifted_boundaries = []
        for index in boundaries:
            num_images_before = sum(start < index for start in placeholder_starts)
            shift = sum(
                len(texts[2 * image_index + 1]) - len(placeholder) for image_index in range(num_images_before)
            )
            shifted_boundaries.append(index + shift)
        return RenderedPrompt("".join(texts), shifted_boundaries)

    def _new_context(self, request: TokenGeneratorRequest, values: Mapping[str, Any]) -> TextContext:
        images = request.prepared_images if isinstance(request, _PreparedRequest) else ()
        if not images:
            return super()._new_context(request, values)
        token_id = self._family.image_token_id
        return TextAndVisionContext(
            **values,
            images=self._image_metadata(values["tokens"], images, token_id),
            vision_token_ids=[token_id],
            has_bidirectional_images=self._family.is_bidirectional,
        )

    def _image_metadata(
        self, tokens: np.ndarray, images: Sequence[ProcessedImage], token_id: int
    ) -> list[ImageMetadata]:
        indices = np.flatnonzero(tokens == token_id).tolist()
        text = self._token_text(token_id)
        token_counts = [self._family.expand(image).count(text) for image in images]
        if sum(token_counts) != len(indices):
            raise CheckpointError(
                self._checkpoint,
                f"the images need {sum(token_counts)} tokens {text!r}, but the encoded prompt has "
                f"{len(indices)}",
            )
        metadata, first_index = [], 0
        for image, count in zip(images, token_counts, strict=True):
            image_indices = indices[first_index : first_index + count]
            first_index += count
            metadata.append(
                ImageMetadata(
                    start_idx=image_indices[0],
                    end_idx=image_indices[-1] + 1,
                    pixel_values=image.pixel_values,
                    image_hash=image.digest,
                    num_embedding_rows=count,
                    arguments=image.arguments,
                )
            )
        return metadata

    def _token_text(self, token_id: int) -> str:
        text = self.backend.id_to_token(token_id)
        if text is None:
            raise CheckpointError(
                self._checkpoint, f"its tokenizer has no token {token_id}, which stands for images"
            )
        return text


class _ImageCache:
    """An LRU cache of prepared images. The key is a digest of the image file and of ``detail``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._images: OrderedDict[bytes, ProcessedImage] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> ProcessedImage | None:
        with self._lock:
            if key in self._images:
                self._images.move_to_end(key)
            return self._images.get(key)

    def put(self, key: bytes, image: ProcessedImage) -> None:
        with self._lock:
            if key in self._images or image.num_bytes > self._max_bytes:
                return
            self._images[key] = image
            self._num_bytes += image.num_bytes
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._images.popitem(last=False)[1].num_bytes


def _occurrences(text: str, part: str) -> list[int]:
    """Return the indices at which ``part`` begins in ``text``, without overlaps."""
    indices, start = [], text.find(part)
    while start >= 0:
        indices.append(start)
        start = text.find(part, start + len(part))
    return indices
