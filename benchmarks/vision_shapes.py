"""Vision models for benchmarks: configurations, random checkpoints, and requests with an image."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.bench.random_weights import write_random_tensors

IMAGE_TOKEN = 300
"""Token id of image placeholders. Random text has ids of 1 to 255, so that it contains no placeholder."""
_SMOLVLM: dict[str, Any] = {
    "model_type": "smolvlm",
    "architectures": ["SmolVLMForConditionalGeneration"],
    "image_token_id": IMAGE_TOKEN,
    "scale_factor": 4,
    "text_config": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49280,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "pad_token_id": 0,
    },
    "vision_config": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    },
}
_QWEN3_VL: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": IMAGE_TOKEN + 1,
    "vision_start_token_id": IMAGE_TOKEN + 2,
    "vision_end_token_id": IMAGE_TOKEN + 3,
    "tie_word_embeddings": True,
    "text_config": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        "tie_word_embeddings": True,
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": 2048,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}


def _with_sizes(
    config: Mapping[str, Any], text: Mapping[str, Any], vision: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a configuration with other values in its text and vision parts."""
    return {
        **config,
        "text_config": {**config["text_config"], **text},
        "vision_config": {**config["vision_config"], **vision},
    }


SHAPES: Mapping[str, dict[str, Any]] = {
    "smolvlm-256m": _SMOLVLM,
    "qwen3-vl-2b": _QWEN3_VL,
    "qwen3-vl-2b-half": _with_sizes(
        _QWEN3_VL, {"num_hidden_layers": 14}, {"depth": 12, "deepstack_visual_indexes": [2, 5, 8]}
    ),
    "tiny-smolvlm": _with_sizes(
        _SMOLVLM,
        {"hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 1024},
        {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2},
    ),
    "tiny-qwen3-vl": _with_sizes(
        _QWEN3_VL,
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "vocab_size": 1024,
        },
        {
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_heads": 2,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    ),
}
"""Name -> ``config.json``.

smolvlm-256m and qwen3-vl-2b have the sizes of published models. qwen3-vl-2b-half has half of the layers, for
machines with little memory. The tiny models are for trial runs of the benchmark.
"""
GRID_SIZE = 32
"""Patches per row and per column of an image or, if the model has tiles, of a tile."""
TEXT_LENGTH = 20
"""Number of text tokens before the image, and also after the image."""


@dataclass(frozen=True)
class Request:
    """A prompt with one image."""

    tokens: list[int]
    pixels: npt.NDArray[np.float32]
    """The pixel values that the image processor would return."""

    def with_other_text(self, seed: int) -> Request:
        """Return a request with the same image and other text after it."""
        words = np.random.default_rng(seed).integers(1, 256, TEXT_LENGTH).tolist()
        return Request([*self.tokens[:-TEXT_LENGTH], *words], self.pixels)


def is_qwen(config: Mapping[str, Any]) -> bool:
    """Return whether the model is Qwen3-VL, which has a patch grid per image instead of tiles."""
    return str(config["model_type"]) == "qwen3_vl"


def random_request(config: Mapping[str, Any], num_tiles: int, seed: int) -> Request:
    """Return a request with random text and pixels.

    Args:
        config: the configuration of the model.
        num_tiles: the number of image tiles. Ignored for a Qwen model.
        seed: the seed of the random numbers.
    """
    rng = np.random.default_rng(seed)
    if is_qwen(config):
        pixels = rng.normal(size=(GRID_SIZE * GRID_SIZE, 6 * 16 * 16)).astype(np.float32)
        num_image_tokens = GRID_SIZE * GRID_SIZE // 4
        start_tokens, end_tokens = [IMAGE_TOKEN + 2], [IMAGE_TOKEN + 3]
    else:
        image_size = config["vision_config"]["image_size"]
        pixels = rng.normal(size=(num_tiles, 3, image_size, image_size)).astype(np.float32)
        num_image_tokens = num_tiles * (GRID_SIZE // config["scale_factor"]) ** 2
        start_tokens, end_tokens = [], []
    words = rng.integers(1, 256, 2 * TEXT_LENGTH).tolist()
    return Request(
        [
            *words[:TEXT_LENGTH],
            *start_tokens,
            *[IMAGE_TOKEN] * num_image_tokens,
            *end_tokens,
            *words[TEXT_LENGTH:],
        ],
        pixels,
    )


def write_checkpoint(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a checkpoint with random bfloat16 weights, if the folder has none.

    Tensors have the names of transformers, so that all engines can load the checkpoint.
    """
    if (folder / "complete").exists():
        return
    from transformers import AutoConfig, AutoModelForImageTextToText

    settings = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(settings, dtype=torch.bfloat16)
    tied_names = set(getattr(model, "all_tied_weights_keys", {}))
    shapes = {
        name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied_names
    }
    folder.mkdir(parents=True, exist_ok=True)
    settings.dtype = torch.bfloat16
    settings.save_pretrained(folder)
    write_random_tensors(folder / "model.safetensors", shapes, "bfloat16")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": None, "pad_token_id": 0}))
    (folder / "complete").touch()
