"""Writes checkpoints with random weights for any architecture and any sizes, to measure speed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from penstock.architectures.registry import PIPELINE_REGISTRY
from penstock.config import HuggingFaceConfig
from penstock.dtype import DType
from penstock.errors import InputError
from penstock.nn import Loader
from penstock.weights.json_files import read_json_object
from penstock.weights.safetensors import SINGLE_FILE

SHAPES: Mapping[str, Mapping[str, object]] = {
    "l110m": {
        "model_type": "llama",
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "dtype": "bfloat16",
    },
    "l1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "dtype": "bfloat16",
    },
    "q800m": {
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "dtype": "bfloat16",
    },
}
"""Name -> ``config.json``.

``l110m`` is a Llama with 134 million parameters, ``l1b`` a Llama with 1.1 billion, and ``q800m`` a text model
of Qwen3.5 with 752 million.
"""

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_DEFAULT_DTYPE = "bfloat16"
_NUM_RANDOM_VALUES = 4_194_301
"""Number of random values that are drawn. A checkpoint repeats these values, because drawing a billion values
would take longer than the measurement.

The number is prime, so that no two rows or matrices are equal. The CPU could keep equal rows in its cache,
and a step would read less memory than with a real model.
"""
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "layer_types", "num_kv_shared_layers", "no_rope_layers")
_LENGTH_KEYS = ("max_position_embeddings", "n_positions")


def shape_config(shape: str) -> dict[str, object]:
    """Return the ``config.json`` of ``shape``: a name in `SHAPES`, or the path of the file or its folder.

    Raises:
        InputError: the shape is neither a name nor a path.
        CheckpointError: the file is not a JSON object.
    """
    if shape in SHAPES:
        return dict(SHAPES[shape])
    path = Path(shape)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise InputError(
            f"there is no shape {shape!r}: use {', '.join(SHAPES)}, or the path of a config.json"
        )
    return read_json_object(path)


def narrow_config(config: Mapping[str, object], *, max_length: int) -> dict[str, object]:
    """Return the configuration of a tiny model with the same number and types of layers as ``config``.

    Almost all of the step time of the tiny model is spent in Python.

    Args:
        config: a ``config.json`` of a known architecture.
        max_length: the required maximum length, in tokens.

    Raises:
        UnknownArchitectureError: the ``model_type`` is unknown.
    """
    architecture = PIPELINE_REGISTRY.retrieve_architecture(HuggingFaceConfig(config), "config.json")
    assert architecture.tiny_config is not None
    tiny_config = architecture.tiny_config()
    depth = tiny_config.get("num_hidden_layers", tiny_config.get("n_layer"))
    scalar_values = {
        key: value
        for key, value in tiny_config.items()
        if key not in _LAYER_KEYS and not (isinstance(value, list) and len(value) == depth)
    }
    layer_values = {key: config[key] for key in _LAYER_KEYS if key in config}
    lengths = {
        key: max(max_length, length)
        for key in _LENGTH_KEYS
        if isinstance(length := tiny_config.get(key), int)
    }
    return {**scalar_values, **layer_values, **lengths}


def write_random_checkpoint(folder: Path, config: Mapping[str, object], *, seed: int = 0) -> Path:
    """Write a checkpoint with random weights and a tokenizer with the words ``t0``, ``t1`` and so on.

    Tensors with at most one dimension are filled with 1, all others with small random numbers.

    Args:
        folder: an existing folder.
        config: a ``config.json`` of a known architecture. Its ``dtype`` is the data type of the weights;
            the default is bfloat16. Its ``quantization_config`` is dropped.
        seed: the seed of the random numbers.

    Raises:
        UnknownArchitectureError: the ``model_type`` is unknown.
        CheckpointError: a value of the configuration is missing or invalid.
        InputError: the ``dtype`` is not one of float32, bfloat16 and float16.
    """
    values = {**config, "dtype": config.get("dtype", config.get("torch_dtype", _DEFAULT_DTYPE))}
    values.pop("quantization_config", None)
    if values["dtype"] not in _DTYPES:
        raise InputError(f"random weights are {', '.join(_DTYPES)}, not {values['dtype']!r}")
    shapes = tensor_shapes(values)
    (folder / "config.json").write_text(json.dumps(values))
    write_random_tensors(folder / SINGLE_FILE, shapes, values["dtype"], seed=seed)
    _write_tokenizer(folder, int(cast(int, values["vocab_size"])))
    return folder


def tensor_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all tensors that an architecture reads with this ``config.json``.

    Raises:
        UnknownArchitectureError: the ``model_type`` is unknown.
        CheckpointError: a value of the configuration is missing or invalid.
    """
    huggingface_config = HuggingFaceConfig(config)
    architecture = PIPELINE_REGISTRY.retrieve_architecture(huggingface_config, "config.json")
    recorder = _ShapeRecorder()
    loader = Loader(recorder, _DEFAULT_DTYPE, torch.device("meta"))
    with torch.no_grad():
        architecture.load_pipeline_model().build(loader, huggingface_config, 1)
    return recorder.shapes


class _ShapeRecorder:
    """A `TensorSource` that returns tensors without data and records the requested names and shapes."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.shapes[name] = shape
        return torch.empty(shape, device="meta")

    def expect(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return True

    def stored_encoding(self, name: str) -> None:
        """Return None: all weights are floats."""

    def input_order(self, name: str) -> bytes:
        return b""

    def read_linear(
        self, name: str, shape: tuple[int, int], *, transposed: bool = False
    ) -> tuple[None, dict[str, Tensor]]:
        weight = self.tensor(name, shape[::-1] if transposed else shape)
        return None, {"weight": weight.T if transposed else weight}

    def rows(
        self, name: str, shape: tuple[int, int], start: int, stop: int
    ) -> tuple[None, dict[str, Tensor]]:
        return None, {"weight": self.tensor(name, shape)[start:stop]}

    def is_mapped(self, name: str) -> bool:
        return False

    def release(self, name: str) -> None:
        """Do nothing: the tensors use no memory."""


def write_random_tensors(
    file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, *, seed: int = 0
) -> None:
    """Write a safetensors file with random values.

    Tensors with at most one dimension are filled with 1, all others with small random numbers.

    Args:
        file: the file.
        shapes: name -> shape of each tensor.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        seed: the seed of the random numbers.
    """
    bytes_per_value, start, header = DType(dtype).size_in_bytes, 0, {}
    for name, shape in shapes.items():
        end = start + prod(shape) * bytes_per_value
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    generator = torch.Generator().manual_seed(seed)
    random_values = (0.02 * torch.randn(_NUM_RANDOM_VALUES, generator=generator)).to(DType(dtype).to_torch())
    ones = torch.ones_like(random_values)
    with file.open("wb") as stream:  # written in parts, because the file can be larger than the memory
        stream.write(len(text).to_bytes(8, "little") + text)
        value_index = 0
        for shape in shapes.values():
            source, num_remaining = (random_values if len(shape) > 1 else ones), prod(shape)
            while num_remaining > 0:
                values = source[value_index : value_index + num_remaining]
                stream.write(values.view(torch.uint8).numpy().data)
                num_remaining -= len(values)
                value_index = (value_index + len(values)) % _NUM_RANDOM_VALUES


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
