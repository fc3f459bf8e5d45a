"""Converts the images of `LLM` arguments and chat messages to the contents of image files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from penstock.errors import InputError
from penstock.llm.prompts import Prompt, split_prompts
from penstock.media.decoding import encode_image
from penstock.media.sources import decode_data_url

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

Image: TypeAlias = (
    "PILImage | npt.NDArray[np.uint8] | str | PathLike[str] | bytes | bytearray | memoryview[int]"
)
"""A PIL image, an array ``[H, W, 3]`` or ``[H, W]`` of uint8, the path of a file, or the bytes of a file."""


def image_bytes(image: Image) -> bytes:
    """Return the content of an image file. PIL images and arrays are encoded.

    Raises:
        InputError: the file cannot be read, or the object is not an image.
    """
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str | PathLike):
        try:
            return Path(image).read_bytes()
        except OSError as error:
            raise InputError(f"the image {str(image)!r} cannot be read: {error}") from error
    return encode_image(image)


def prompts_with_images(
    prompts: Prompt | Sequence[Prompt], images: Image | Sequence[Image] | None
) -> list[tuple[Prompt, list[Image] | None]]:
    """Return each prompt with its images, or with None if it has none.

    Args:
        prompts: one prompt or a list of prompts.
        images: an image or a list of images for one prompt. For a list of prompts it is a list with one entry
            for each prompt.

    Raises:
        InputError: the list does not have one entry for each prompt.
    """
    batch, is_one_prompt = split_prompts(prompts)
    return list(zip(batch, images_per_prompt(images, len(batch), is_one_prompt=is_one_prompt), strict=True))


def images_per_prompt(images: object, num_prompts: int, *, is_one_prompt: bool) -> list[list[Image] | None]:
    """Return the images of each prompt, None for a prompt without images. No file is read.

    Args:
        images: an image or a list of images for one prompt. For a list of prompts it is a list with one entry
            for each prompt.
        num_prompts: the number of prompts.
        is_one_prompt: whether a single prompt was given instead of a list.

    Raises:
        InputError: the list does not have one entry for each prompt.
    """
    if images is None:
        return [None] * num_prompts
    entries = [images] if is_one_prompt else list(cast("Iterable[object]", images))
    if len(entries) != num_prompts:
        raise InputError(f"images has {len(entries)} entries for {num_prompts} prompts: give one for each")
    return [None if item is None else _as_list(item) for item in entries]


def _as_list(images: object) -> list[Image]:
    if isinstance(images, Sequence) and not isinstance(images, str | bytes | bytearray | memoryview):
        return [*images]
    return [cast("Image", images)]  # `image_bytes` rejects objects that are not images


def separate_images(messages: object) -> tuple[object, list[bytes] | None, list[str] | None]:
    """Return (messages without image data, image files in order, ``detail`` of each image).

    An image part is ``{"type": "image", "image": ...}`` or OpenAI's ``image_url`` with a ``data:`` URL.
    Messages without images are returned with None and None. Malformed messages are returned unchanged,
    because the chat template rejects them.

    Raises:
        InputError: an image part has no image, an image cannot be read, or a URL is not a ``data:`` URL.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return messages, None, None
    images: list[bytes] = []
    details: list[str] = []
    messages_without_images = [_without_images(message, images, details) for message in messages]
    return (messages_without_images, images, details) if images else (messages, None, None)


def _without_images(message: object, images: list[bytes], details: list[str]) -> object:
    if not isinstance(message, Mapping) or not isinstance(content := message.get("content"), list):
        return message
    parts = []
    for part in content:
        part_type = part.get("type") if isinstance(part, Mapping) else None
        if part_type == "image" and "image" in part:
            images.append(image_bytes(part["image"]))
            details.append(str(part.get("detail") or "auto"))
        elif part_type == "image_url":
            image_url = part.get("image_url")
            url, detail = (
                (image_url.get("url"), image_url.get("detail"))
                if isinstance(image_url, Mapping)
                else (image_url, None)
            )
            if not isinstance(url, str) or not url.startswith("data:"):
                raise InputError(
                    'an image_url must be a data: URL here; give files as {"type": "image", "image": path}'
                )
            images.append(decode_data_url(url))
            details.append(str(detail or "auto"))
        elif part_type == "image":
            raise InputError(f'an image part needs an image: {{"type": "image", "image": ...}}, was {part!r}')
        else:
            parts.append(part)
            continue
        parts.append({"type": "image"})
    return {**message, "content": parts}
