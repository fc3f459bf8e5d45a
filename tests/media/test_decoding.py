"""Decoding of images: equal to Pillow's decoding, except for 16-bit images; refused images; encoding."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image, ImageOps
from support.vision_checkpoint import encode_image_file, random_picture

from penstock.errors import InputError
from penstock.media.decoding import decode_image, encode_image

MAX_PIXELS = 10_000


def decode_with_pillow(data: bytes) -> np.ndarray:
    return np.asarray(ImageOps.exif_transpose(Image.open(BytesIO(data))).convert("RGB"))


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF"])
def test_formats_are_decoded_as_by_pillow(image_format: str) -> None:
    data = encode_image_file(random_picture(), image_format)
    assert np.array_equal(np.asarray(decode_image(data, MAX_PIXELS)), decode_with_pillow(data))


@pytest.mark.parametrize(
    ("mode", "image_format"),
    [("P", "PNG"), ("1", "PNG"), ("L", "JPEG"), ("LA", "PNG"), ("RGBA", "WEBP"), ("CMYK", "JPEG")],
)
def test_colour_modes_are_decoded_as_by_pillow(mode: str, image_format: str) -> None:
    data = encode_image_file(random_picture().convert(mode), image_format)
    decoded_image = decode_image(data, MAX_PIXELS)
    assert decoded_image.mode == "RGB"
    assert np.array_equal(np.asarray(decoded_image), decode_with_pillow(data))


def test_16_bit_images_are_scaled_to_8_bits() -> None:
    grey_values = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    decoded_image = np.asarray(decode_image(encode_image_file(Image.fromarray(grey_values)), MAX_PIXELS))
    assert np.array_equal(decoded_image[..., 0], grey_values >> 8)


def test_16_bit_pgm_images_are_scaled_to_8_bits() -> None:
    grey_values = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    data = b"P5 64 64 65535\n" + grey_values.astype(">u2").tobytes()
    assert np.array_equal(np.asarray(decode_image(data, MAX_PIXELS))[..., 1], grey_values >> 8)
    plain_image = b"P2 2 1 1023\n0 1023\n"  # Pillow scales the values to 16 bits
    assert np.asarray(decode_image(plain_image, MAX_PIXELS))[0, :, 0].tolist() == [0, 255]


def test_exif_rotation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode_image_file(random_picture(), "PNG", exif=exif)
    assert decode_image(data, MAX_PIXELS).size == (30, 40)
    assert np.array_equal(np.asarray(decode_image(data, MAX_PIXELS)), decode_with_pillow(data))


def test_truncated_malformed_and_empty_images_are_refused() -> None:
    data = encode_image_file(random_picture(), "PNG")
    for invalid in (data[: len(data) // 2], data[:40], encode_image_file(random_picture(), "JPEG")[:500]):
        with pytest.raises(InputError, match=r"the image cannot be decoded|is not an image"):
            decode_image(invalid, MAX_PIXELS)
    for invalid in (b"", b"<svg/>", b"%PDF-1.4", b"\x00" * 100):
        with pytest.raises(InputError, match="not an image in one of the formats PNG"):
            decode_image(invalid, MAX_PIXELS)


def test_animations_are_refused() -> None:
    frames = [random_picture(seed) for seed in range(3)]
    for image_format in ("GIF", "WEBP", "PNG", "TIFF"):
        data = encode_image_file(frames[0], image_format, save_all=True, append_images=frames[1:])
        with pytest.raises(InputError, match=r"animated or has several pages \(3\)"):
            decode_image(data, MAX_PIXELS)


def test_decompression_bombs_are_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
    with pytest.raises(InputError, match="has 101 x 100 = 10100 pixels, but the limit is 10000"):
        decode_image(png_header(101, 100), MAX_PIXELS)
    with pytest.raises(InputError, match="too many pixels"):
        decode_image(png_header(60_000, 60_000), MAX_PIXELS)


def png_header(width: int, height: int) -> bytes:
    def png_chunk(chunk_type: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body))
            + chunk_type
            + body
            + struct.pack(">I", zlib.crc32(chunk_type + body))
        )

    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(b"\0")) + png_chunk(b"IEND", b"")


def test_encoding_is_lossless() -> None:
    pixels = np.asarray(random_picture())
    for image in (pixels, random_picture(), pixels[..., 0]):
        decoded_image = np.asarray(decode_image(encode_image(image), MAX_PIXELS))
        expected = pixels if getattr(image, "ndim", 3) == 3 else pixels[..., :1].repeat(3, axis=2)
        assert np.array_equal(decoded_image, expected)
