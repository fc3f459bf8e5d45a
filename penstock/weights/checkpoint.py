"""Opening a checkpoint: detect its format and read its headers. Loads no torch."""

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
    """A checkpoint before any tensor is read."""

    format: CheckpointFormat
    headers: Headers
    """The tensors for the model, by name."""
    cache_scales: CacheScales = field(default_factory=dict)
    """The stored scales of a KV cache of 8-bit floats."""


def is_gguf(checkpoint: Path) -> bool:
    """Return whether a checkpoint is a GGUF file. Such a file also holds configuration and tokenizer."""
    return checkpoint.suffix.lower() == gguf.SUFFIX and not checkpoint.is_dir()


def open_checkpoint(checkpoint: Path) -> Checkpoint:
    """Read the headers of a safetensors or GGUF file, or of a folder, and detect the format.

    Raises:
        WeightsError: there are no tensors, a part is missing, or a file is damaged.
        UnknownArchitectureError: it is a GGUF file of an unknown family.
        ConfigError: no format reads the quantization of the weights.
    """
    config: Mapping[str, object] = {}
    if is_gguf(checkpoint):
        stored: Headers = read_gguf_headers(checkpoint)
    else:
        stored = read_checkpoint_headers(checkpoint)
        file = checkpoint / "config.json"
        config = read_json_object(file) if checkpoint.is_dir() and file.is_file() else {}
        if checkpoint.is_dir() and not quantization_section(config):
            config = {**config, **_separate_quantization_config(checkpoint)}
    found = FORMATS.detect(config, stored)
    return Checkpoint(found, found.headers(config, stored), find_cache_scales(config, stored))


_QUANTIZATION_FILES = {
    "quantization_config.json": "",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files that may contain ``quantization_config``, with the method to assume if the file names none."""


def _separate_quantization_config(folder: Path) -> Mapping[str, object]:
    """Return ``quantization_config`` from a file other than ``config.json``; empty without such a file."""
    for name, method in _QUANTIZATION_FILES.items():
        if (folder / name).is_file():
            section = read_json_object(folder / name)
            return {"quantization_config": {"quant_method": method, **section} if method else section}
    return {}
