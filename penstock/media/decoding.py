"""Decodes images with Pillow, within limits. Pillow is imported when a function is called."""

from __future__ import annotations

import warnings
from io import BytesIO
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""The accepted formats, by their names in Pillow. All other decoders of Pillow are disabled."""


def decode_image(data: bytes, max_pixels: int) -> Image:
    """Return an image file as an RGB image, rotated according to its EXIF data.

    The size is checked before any pixel is decoded. Transparency is removed. Palette, grey, CMYK and 16-bit
    images are converted to 8 bits each of red, green and blue.

    Args:
        data: the content of an image file.
        max_pixels: maximum of width times height.

    Raises:
        InputError: the data is not an image of an accepted format, is damaged or truncated, has several
            frames or pages, or has too many pixels.
        MissingDependencyError: Pillow is not installed.
    """
    pil = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `_check_size` replaces Pillow's warnings about large images
            with pil.Image.open(BytesIO(data), formats=FORMATS) as image:
                _check_size(image.size, max_pixels)
                num_frames = getattr(image, "n_frames", 1)
                # An MPO file is a JPEG file with further preview images.
                if num_frames > 1 and image.format != "MPO":
                    raise InputError(
                        f"the image is animated or has several pages ({num_frames}): send one frame"
                    )
                image.load()
                has_16_bits = image.format == "PPM" and image.mode == "I"
                rotated_image = pil.ImageOps.exif_transpose(image)
                return _as_rgb(rotated_image.convert("I;16") if has_16_bits else rotated_image)
    except InputError:
        raise
    except pil.Image.DecompressionBombError as error:
        raise InputError(f"the image has too many pixels: {error}") from None
    except pil.UnidentifiedImageError:
        formats = ", ".join(name for name in FORMATS if name != "PPM")
        raise InputError(f"the data is not an image in one of the formats {formats}") from None
    except (
        Exception
    ) as error:  # decoders raise many types of errors, such as OSError, SyntaxError and struct.error
        raise InputError(f"the image cannot be decoded: {error}") from None


def encode_image(image: object) -> bytes:
    """Return the content of an image file (BMP) for a PIL image or a uint8 array ``[H, W]`` or ``[H, W, 3]``.

    The file is an RGB image, rotated according to the EXIF data of a PIL image.

    Raises:
        InputError: the object is neither an image nor an array, the array is empty or has a different shape
            or type, or the image cannot be decoded.
        MissingDependencyError: Pillow is not installed.
    """
    pil = _pillow()
    if isinstance(image, np.ndarray):
        is_grey, is_color = image.ndim == 2, image.ndim == 3 and image.shape[2] == 3
        if image.dtype != np.uint8 or not (is_grey or is_color) or not image.size:
            raise InputError(
                "an image as an array must be uint8 of shape [H, W] or [H, W, 3], was "
                f"{image.dtype} of shape {list(image.shape)}"
            )
        image = pil.Image.fromarray(np.ascontiguousarray(image))
    if not isinstance(image, pil.Image.Image):
        raise InputError(
            "an image must be a PIL image, a numpy array, a path, or bytes of an image file, was "
            f"{type(image).__name__}"
        )
    stream = BytesIO()
    try:
        _as_rgb(pil.ImageOps.exif_transpose(image)).save(stream, "BMP")
    except OSError as error:
        raise InputError(f"the image cannot be decoded: {error}") from None
    return stream.getvalue()


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise InputError(
            f"the image has {width} x {height} = {width * height} pixels, but the limit is {max_pixels} "
            "(--max-image-pixels): send a smaller image"
        )


def _as_rgb(image: Image) -> Image:
    if image.mode.startswith("I;16"):  # scales 16-bit values, because Pillow's convert clips them at 255
        image = _pillow().Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def _pillow() -> ModuleType:
    try:
        import PIL
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise MissingDependencyError("Pillow", "vision", "decoding images") from error
    return PIL
