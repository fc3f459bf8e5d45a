"""`TextAndVisionContext`: the context of a text request with images."""

from __future__ import annotations

from bisect import bisect_right
from hashlib import blake2b
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import InputError
from penstock.pipelines.core.context import TextContext

_HASH_SIZE = 32  # bytes
_WORD_TYPE = "<u8"


class ImageMetadata(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An image in a prompt: its span of tokens, its pixels and its content hash.

    Tokens in the span with an id in ``vision_token_ids`` are placeholders. The rows of the vision encoder
    replace their embeddings. The span may contain other tokens, such as separators between the tiles of an
    image.
    """

    start_idx: int
    """Index of the first placeholder of the image."""
    end_idx: int
    """Index after the last placeholder of the image."""
    pixel_values: npt.NDArray[np.generic]
    """The image as returned by the model's processor, without a batch dimension."""
    image_hash: bytes | None = None
    """Digest of the content, 32 bytes, see `image_digest`. Images with equal digests have equal encoder rows.
    Without a digest, the encoder rows are not cached, and no request shares the KV blocks of the context.
    """
    num_embedding_rows: int | None = None
    """Number of rows that the vision encoder returns; None if it is the length of the span."""
    arguments: dict[str, npt.NDArray[np.generic]] = msgspec.field(default_factory=dict)
    """Other outputs of the processor that the encoder or the decoder reads, such as ``image_grid_thw``."""

    def __post_init__(self) -> None:
        if self.image_hash is not None and len(self.image_hash) != _HASH_SIZE:
            raise InputError(f"image_hash must have {_HASH_SIZE} bytes, has {len(self.image_hash)}")
        if self.start_idx < 0:
            raise InputError(f"Images must have a valid start index, got {self.start_idx}")
        if self.end_idx <= self.start_idx:
            raise InputError(
                f"Images must have a valid start and end index, got {self.start_idx} and {self.end_idx}"
            )

    @property
    def embedding_rows(self) -> int:
        """The number of rows that the vision encoder returns for the image."""
        return self.end_idx - self.start_idx if self.num_embedding_rows is None else self.num_embedding_rows

    def __eq__(self, other: object) -> bool:
        if type(other) is not ImageMetadata:
            return NotImplemented
        return (
            (self.start_idx, self.end_idx, self.image_hash, self.num_embedding_rows)
            == (other.start_idx, other.end_idx, other.image_hash, other.num_embedding_rows)
            and _is_equal_array(self.pixel_values, other.pixel_values)
            and self.arguments.keys() == other.arguments.keys()
            and all(_is_equal_array(array, other.arguments[name]) for name, array in self.arguments.items())
        )


class TextAndVisionContext(TextContext, kw_only=True, tag=True, omit_defaults=True):
    """A text request with images.

    The context keeps the pixels until the request ends, because chunked prompts and preempted contexts need
    them again. An image is encoded when a step first computes one of its placeholders.

    Raises:
        InputError: the images are not in order, overlap, or do not match the tokens.
    """

    pixel_values: tuple[npt.NDArray[np.generic], ...] = ()
    """The pixels of all images. If it is empty, the constructor sets it from ``images``."""
    extra_model_args: dict[str, npt.NDArray[np.generic]] = msgspec.field(default_factory=dict)
    """Further arguments of a model that reads ``pixel_values`` itself. Penstock's own models read
    `ImageMetadata.arguments`."""
    images: list[ImageMetadata] = msgspec.field(default_factory=list)
    """The images, in the order of their tokens."""
    vision_token_ids: list[int] = msgspec.field(default_factory=list)
    """The ids of placeholder tokens."""
    has_bidirectional_images: bool = False
    """Whether the tokens of an image attend to each other in both directions. If set, all tokens of an image
    are computed in one step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.images:
            return
        if not self.pixel_values:
            self.pixel_values = tuple(image.pixel_values for image in self.images)
        self._check_images()
        for image in self.images:
            for index, word in image_hash_overrides(image).items():
                self.token_hash_overrides.setdefault(index, word)

    @property
    def image_idx(self) -> int:
        """Index of the first image that has tokens to compute; ``len(images)`` if there is none."""
        return bisect_right(self.images, self.start_idx, key=lambda image: image.end_idx)

    @property
    def next_images(self) -> list[ImageMetadata]:
        """The images with tokens that are not computed yet."""
        return self.images[self.image_idx :]

    @property
    def next_images_in_window(self) -> list[ImageMetadata]:
        """The images with at least one token in ``next_tokens``."""
        return [image for image in self.next_images if image.start_idx < self.active_idx]

    @property
    def needs_vision_encoding(self) -> bool:
        """Whether there are images with tokens that are not computed yet.

        With ``pixel_values`` but without ``images``, the value is that of ``is_initial_prompt``.
        """
        if not self.images:
            return bool(self.pixel_values) and self.is_initial_prompt
        return self.image_idx < len(self.images)

    @property
    def identifies_images(self) -> bool:
        """Whether block hashes depend on the content of all images, so that requests may share the blocks.

        True without images and pixels. With pixels only, True if ``token_hash_overrides`` is set.
        """
        if self.images:
            return all(image.image_hash is not None for image in self.images)
        return bool(self.token_hash_overrides) or not self.pixel_values

    @property
    def image_token_indices(self) -> npt.NDArray[np.int32]:
        """The indices of all placeholder tokens of images."""
        return np.concatenate([*map(self.placeholders, self.images), np.empty(0, np.int32)])

    def placeholders(self, image: ImageMetadata) -> npt.NDArray[np.int32]:
        """Return the indices of an image's placeholder tokens, in the order of the encoder rows."""
        span = self.tokens[image.start_idx : image.end_idx]
        span_indices = np.flatnonzero(np.isin(span, self.vision_token_ids))
        return (span_indices + image.start_idx).astype(np.int32)

    def compute_image_aligned_idx(self, idx: int) -> int:
        """Return ``idx``, or the start of the image that ``idx`` would split."""
        image = self._image_around(idx)
        return idx if image is None else image.start_idx

    def boundary_before(self, idx: int) -> int:
        return self.compute_image_aligned_idx(idx) if self.has_bidirectional_images else idx

    def boundary_after(self, idx: int) -> int:
        image = self._image_around(idx) if self.has_bidirectional_images else None
        return idx if image is None else image.end_idx

    def _image_around(self, idx: int) -> ImageMetadata | None:
        """Return the image with ``start_idx < idx < end_idx``."""
        position = bisect_right(self.images, idx, key=lambda image: image.end_idx)
        if position == len(self.images) or self.images[position].start_idx >= idx:
            return None
        return self.images[position]

    def _check_images(self) -> None:
        images, ids = self.images, self.vision_token_ids
        for first, second in pairwise(images):
            if first.start_idx > second.start_idx:
                raise InputError(f"Images must be sorted, but {second.start_idx} follows {first.start_idx}")
            if first.end_idx > second.start_idx:
                raise InputError(
                    f"Images must be non-overlapping: one ends at {first.end_idx}, the next begins at "
                    f"{second.start_idx}"
                )
        if images[-1].end_idx > self.end_idx:
            raise InputError(
                f"Images must be before the end of the token array: {images[-1].end_idx} > {self.end_idx}"
            )
        for image in images:
            boundary_tokens = self.tokens[[image.start_idx, image.end_idx - 1]].tolist()
            if not set(boundary_tokens) <= set(ids):
                raise InputError(
                    f"Images must be filled with <vision_token_id> ({ids}): the tokens at {image.start_idx} "
                    f"and {image.end_idx - 1} are {boundary_tokens[0]} and {boundary_tokens[1]}"
                )
            num_placeholders = len(self.placeholders(image))
            if num_placeholders != image.embedding_rows:
                raise InputError(
                    f"the image at token {image.start_idx} has {image.embedding_rows} rows of embeddings, "
                    f"but {num_placeholders} placeholder tokens"
                )


def image_digest(
    pixel_values: npt.NDArray[np.generic], arguments: dict[str, npt.NDArray[np.generic]]
) -> bytes:
    """Return the digest of the processor outputs for one image, including their shapes and types."""
    digest = blake2b(digest_size=_HASH_SIZE)
    for name, array in [("", pixel_values), *sorted(arguments.items())]:
        digest.update(f"{name}:{array.dtype}:{array.shape};".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    return digest.digest()


def image_hash_overrides(image: ImageMetadata) -> dict[int, int]:
    """Return the ids to hash instead of the first 4 tokens of an image, by token index; {} without a digest.

    The ids are the 64-bit words of the digest. They start at the first token of the image, because the keys
    and values of every placeholder depend on the whole image. A shorter image gets fewer ids.
    """
    if image.image_hash is None:
        return {}
    words = np.frombuffer(image.image_hash, _WORD_TYPE).tolist()
    return dict(zip(range(image.start_idx, image.end_idx), words, strict=False))


def _is_equal_array(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> bool:
    return a.dtype == b.dtype and np.array_equal(a, b)
