"""A small LLaVA checkpoint with a tokenizer, a chat template and an image processor, and test images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from support.checkpoints import VISION_DECODERS, write_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers

(LLAVA,) = (candidate for candidate in VISION_DECODERS if candidate.name == "llava")
IMAGE, EOS = 129, 128
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}[assistant]"
)
PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
    "do_convert_rgb": True,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
    "resample": 3,
}


def write_llava(folder: Path, **config: Any) -> Path:
    """Write a checkpoint whose tokens are the ASCII characters, ``</s>`` and ``<image>``."""
    assert LLAVA.tiny_config is not None
    write_checkpoint(folder, LLAVA.tiny_config() | {"eos_token_id": EOS} | config)
    vocabulary = {chr(code): code for code in range(128)} | {"</s>": EOS, "<image>": IMAGE}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["</s>", "<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def random_picture(seed: int = 0, size: tuple[int, int] = (40, 30)) -> Image.Image:
    """Return a random RGB image."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encode_image_file(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    """Return the bytes of an image file."""
    stream = BytesIO()
    image.save(stream, file_format, **options)
    return stream.getvalue()


def image_chat(text: str, images: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a conversation with one message, which has images before its text."""
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
