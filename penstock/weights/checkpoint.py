"""`open_checkpoint`: reads the headers of a checkpoint and detects its format. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.weights import gguf
from penstock.weights.cache_scales import CacheScales, find_cache_scales
from penstock.weights.formats import FORMATS, CheckpointFormat, Headers, quantization_section
from penstock.weights.gguf_names import read_gguf_headers
from penstock.weights.json_files import read_json_object
from penstock.weights.safetensors import read_checkpoint_headers


@dataclass(frozen=True)
class Checkpoint:
    """The headers of a checkpoint. No tensor data has been read."""

    format: CheckpointFormat
    headers: Headers
    """Tensor name -> header, as the model reads the tensors (see `CheckpointFormat.headers`)."""
    cache_scales: CacheScales = field(default_factory=dict)
    """The stored scales for a KV cache of 8-bit floats."""


def is_gguf(checkpoint: Path) -> bool:
    """Return whether a checkpoint is a GGUF file, by its suffix.

    A GGUF file also contains the configuration and the tokenizer.
    """
    return checkpoint.suffix.lower() == gguf.SUFFIX and not checkpoint.is_dir()


def open_checkpoint(checkpoint: Path) -> Checkpoint:
    """Read the headers of a safetensors or GGUF file, or of a folder, and detect the format.

    Raises:
        WeightsError: there are no tensors, a shard is missing, or a file is damaged.
        CheckpointError: ``config.json`` or a separate file with the quantization settings is malformed.
        UnknownArchitectureError: the checkpoint is a GGUF file of an unknown architecture.
        ConfigError: the weights are quantized with a method or a setting that is not supported.
    """
    config: Mapping[str, object] = {}
    if is_gguf(checkpoint):
        stored_headers: Headers = read_gguf_headers(checkpoint)
    else:
        stored_headers = read_checkpoint_headers(checkpoint)
        file = checkpoint / "config.json"
        config = read_json_object(file) if checkpoint.is_dir() and file.is_file() else {}
        if checkpoint.is_dir() and not quantization_section(config):
            config = {**config, **_separate_quantization_config(checkpoint)}
    checkpoint_format = FORMATS.detect(config, stored_headers)
    return Checkpoint(
        checkpoint_format,
        checkpoint_format.headers(config, stored_headers),
        find_cache_scales(config, stored_headers),
    )


_QUANTIZATION_FILES = {
    "quantization_config.json": "",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files that may contain the ``quantization_config``, and the ``quant_method`` to assume if the file has
none.
"""


def _separate_quantization_config(folder: Path) -> Mapping[str, object]:
    """Return ``quantization_config`` from a file other than ``config.json``; empty without such a file."""
    for name, method in _QUANTIZATION_FILES.items():
        if (folder / name).is_file():
            section = read_json_object(folder / name)
            return {"quantization_config": {"quant_method": method, **section} if method else section}
    return {}
