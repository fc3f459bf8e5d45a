"""`TextAndVisionContext`: images, image tokens and image digests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.errors import InputError
from penstock.pipelines.core import (
    ImageMetadata,
    TextAndVisionContext,
    image_digest,
    msgpack_numpy_decoder,
    msgpack_numpy_encoder,
)

IMAGE_TOKEN = 9  # the placeholder


def make_image(start: int, end: int, pixel: float = 1.0, **fields: Any) -> ImageMetadata:
    pixels = np.full((3, 2, 2), pixel, np.float32)
    fields.setdefault("image_hash", image_digest(pixels, {}))
    return ImageMetadata(start_idx=start, end_idx=end, pixel_values=pixels, **fields)


def make_context(
    *images: ImageMetadata, tokens: list[int] | None = None, **fields: Any
) -> TextAndVisionContext:
    if tokens is None:
        tokens = list(range(20, 40))
        for image in images:
            tokens[image.start_idx : image.end_idx] = [IMAGE_TOKEN] * (image.end_idx - image.start_idx)
    return TextAndVisionContext(
        prompt="",
        max_length=50,
        tokens=np.array(tokens),
        images=list(images),
        vision_token_ids=[IMAGE_TOKEN],
        request_id="a",
        **fields,
    )


def test_an_image_needs_encoding_until_all_its_tokens_are_computed() -> None:
    context = make_context(make_image(2, 6), make_image(6, 10, 2.0))
    assert (context.image_idx, len(context.next_images), context.needs_vision_encoding) == (0, 2, True)
    assert len(context.pixel_values) == 2
    context.set_token_indices(active_idx=4)
    assert context.next_images_in_window == context.images[:1]
    context.update(0)
    assert (context.start_idx, context.image_idx) == (4, 0)  # the chunk ends within the first image
    context.set_token_indices(start_idx=6, active_idx=7)
    assert context.next_images_in_window == context.images[1:]
    context.set_token_indices(start_idx=10, active_idx=20)
    assert (context.image_idx, context.next_images, context.needs_vision_encoding) == (2, [], False)
    context.update(30)
    context.reset()
    assert context.needs_vision_encoding


def test_placeholders_exclude_separator_tokens() -> None:
    tokens = [5, IMAGE_TOKEN, IMAGE_TOKEN, 7, IMAGE_TOKEN, 5]
    image = make_image(1, 5, num_embedding_rows=3)
    context = make_context(image, tokens=tokens)
    assert context.placeholders(image).tolist() == context.image_token_indices.tolist() == [1, 2, 4]
    assert context.image_token_indices.dtype == np.int32


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([(6, 10), (2, 6)], "Images must be sorted, but 2 follows 6"),
        ([(2, 6), (5, 9)], "Images must be non-overlapping: one ends at 6, the next begins at 5"),
        ([(18, 21)], "Images must be before the end of the token array: 21 > 20"),
    ],
)
def test_unsorted_overlapping_and_out_of_range_images_are_refused(
    images: list[tuple[int, int]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make_context(*[make_image(*span) for span in images], tokens=[IMAGE_TOKEN] * 20)


def test_images_with_invalid_indices_or_missing_placeholder_tokens_are_refused() -> None:
    with pytest.raises(InputError, match=r"filled with <vision_token_id> \(\[9\]\): .* at 2 and 5 are 22"):
        make_context(make_image(2, 6), tokens=list(range(20, 40)))
    with pytest.raises(InputError, match="at token 1 has 4 rows of embeddings, but 3 placeholder tokens"):
        make_context(make_image(1, 5), tokens=[5, IMAGE_TOKEN, IMAGE_TOKEN, 7, IMAGE_TOKEN, 5])
    with pytest.raises(InputError, match="valid start index, got -1"):
        make_image(-1, 5)
    with pytest.raises(InputError, match="start and end index, got 4 and 4"):
        make_image(4, 4)


def test_block_hashes_depend_on_the_content_of_images() -> None:
    context, equal_context, other_context = (
        make_context(make_image(2, 8, pixel)) for pixel in (1.0, 1.0, 2.0)
    )
    assert context.token_hash_overrides == equal_context.token_hash_overrides
    assert sorted(context.token_hash_overrides) == [2, 3, 4, 5]  # the digest has 4 words of 8 bytes
    assert not set(context.token_hash_overrides.values()) & set(other_context.token_hash_overrides.values())
    assert sorted(make_context(make_image(2, 4)).token_hash_overrides) == [2, 3]
    assert not make_context(make_image(2, 4, image_hash=None)).token_hash_overrides


def test_the_digest_depends_on_values_shape_dtype_and_arguments() -> None:
    pixels = np.zeros((2, 4), np.float32)
    digests = {
        image_digest(pixels, {}),
        image_digest(pixels + 1, {}),
        image_digest(pixels.T, {}),
        image_digest(pixels.astype(np.int32), {}),
        image_digest(pixels, {"grid": np.array([1, 2])}),
        image_digest(pixels, {"grid": np.array([2, 1])}),
    }
    assert len(digests) == 6
    assert image_digest(pixels.copy(), {}) in digests


def test_only_images_with_bidirectional_attention_are_indivisible() -> None:
    causal_context, bidirectional_context = (
        make_context(make_image(2, 6), make_image(6, 9), has_bidirectional_images=is_bidirectional)
        for is_bidirectional in (False, True)
    )
    indices = range(1, 11)
    assert [causal_context.boundary_before(index) for index in indices] == [*indices]
    assert [causal_context.boundary_after(index) for index in indices] == [*indices]
    assert [bidirectional_context.boundary_before(index) for index in indices] == [
        1,
        2,
        2,
        2,
        2,
        6,
        6,
        6,
        9,
        10,
    ]
    assert [bidirectional_context.boundary_after(index) for index in indices] == [
        1,
        2,
        6,
        6,
        6,
        6,
        9,
        9,
        9,
        10,
    ]
    assert causal_context.compute_image_aligned_idx(4) == 2


def test_a_context_with_images_can_be_serialized() -> None:
    context = make_context(make_image(2, 6, arguments={"grid": np.array([1, 2])}), make_image(7, 9, 2.0))
    context_type = TextAndVisionContext
    decoded_context = msgpack_numpy_decoder(context_type)(msgpack_numpy_encoder()(context))
    assert decoded_context == context
    decoded_context.images[0].arguments["grid"] = np.array([1, 3])
    assert decoded_context != context
