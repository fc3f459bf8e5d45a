"""Writes quantized checkpoints in the format of compressed-tensors, which transformers reads.

Layers with a scale per group are stored as packed codes (``pack-quantized``). Layers with a scale per output
are stored as int8 (``int-quantized``, with activations quantized per token). All other tensors are copied.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import ConfigError
from penstock.host.heartbeat import beat
from penstock.kernels import PackedLinear, encoding_named
from penstock.kernels.linear import tensors_in_rows
from penstock.weights.json_files import read_json_object
from penstock.weights.safetensors import SHARD_INDEX, SINGLE_FILE
from penstock.weights.tensors import Weights

MAX_SHARD_BYTES = 4 << 30
"""Maximum number of bytes of tensors in a file, unless a single tensor is larger."""
_COPIED_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*")
_WORD_BITS = 32


def write_compressed(
    checkpoint: Path, weights: Weights, layers: Iterable[PackedLinear], encoding: str, folder: Path
) -> list[str]:
    """Write a checkpoint whose linear layers are quantized.

    Args:
        checkpoint: the folder of the original checkpoint. Its configuration and tokenizer files are copied.
        weights: the tensors of the original checkpoint.
        layers: the packed layers. Layers that cannot be stored in ``encoding`` are copied from ``weights``.
        encoding: the encoding of the quantized layers.
        folder: the output folder. It must be empty or absent.

    Returns:
        The names of the quantized layers.

    Raises:
        ConfigError: the checkpoint is a single file, such as a GGUF file, its architecture renames the
            tensors, the folder is not empty, or no layer has the encoding.
        OSError: a file cannot be written.
    """
    if not checkpoint.is_dir():
        raise ConfigError("model_path", f"{checkpoint} is a single file: quantize a folder with config.json")
    if Weights.open(checkpoint, shapes_only=True).names != weights.names:
        raise ConfigError(
            "model_path",
            "its architecture renames the tensors of the checkpoint, and such checkpoints cannot be exported",
        )
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError("out", f"{folder} is not empty: name a new folder")
    quantized = dict(_quantized_layers(layers, encoding, weights))
    if not quantized:
        raise ConfigError("encoding", f"the model has no linear layer that can be stored in {encoding}")
    folder.mkdir(parents=True, exist_ok=True)
    matrix_names = [
        name.removesuffix(".weight")
        for name in weights.names
        if name.endswith(".weight") and len(weights.shape(name)) == 2
    ]
    ignored = sorted({"lm_head", *(name for name in matrix_names if name not in quantized)})
    _write_tensors(folder, _checkpoint_tensors(weights, quantized, encoding))
    for pattern in _COPIED_FILES:
        for file in checkpoint.glob(pattern):
            if file.name not in ("config.json", SHARD_INDEX):
                shutil.copyfile(file, folder / file.name)
    config = read_json_object(checkpoint / "config.json")
    config["quantization_config"] = _quantization_config(encoding, ignored)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return sorted(quantized)


def _quantized_layers(
    layers: Iterable[PackedLinear], encoding: str, weights: Weights
) -> Iterator[tuple[str, tuple[PackedLinear, int, int]]]:
    """Yield the layers to store in ``encoding``: (layer name, (packed layer, start row, stop row))."""
    for packed in layers:
        group_size = encoding_named(encoding).group_size or 1
        if packed.encoding != encoding or packed.in_features % group_size:
            continue
        for part in packed.slices:
            name, shape = f"{part.name}.weight", (part.stop - part.start, packed.in_features)
            if name in weights and weights.shape(name) == shape:
                yield part.name, (packed, part.start, part.stop)


def _checkpoint_tensors(
    weights: Weights, quantized: Mapping[str, tuple[PackedLinear, int, int]], encoding: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor for each tensor of the exported checkpoint."""
    unpacked: tuple[PackedLinear | None, Mapping[str, Tensor]] = (None, {})
    order = sorted(weights.names, key=lambda name: _sort_key(name, quantized))
    for name in order:
        layer = name.removesuffix(".weight")
        if layer not in quantized or layer == name:
            yield name, weights.tensor(name, weights.shape(name)).contiguous()
            weights.release(name)
            continue
        packed, start, stop = quantized[layer]
        if unpacked[0] is not packed:  # unpack once for all parts of a fused layer, which are consecutive
            unpacked = (packed, tensors_in_rows(packed))
            beat()
        part = {key: tensor[start:stop] for key, tensor in unpacked[1].items()}
        for key, tensor in _compress_layer(part, encoding).items():
            yield f"{layer}.{key}", tensor.contiguous()


def _sort_key(name: str, quantized: Mapping[str, tuple[PackedLinear, int, int]]) -> tuple[str, int]:
    """Return a sort key that makes the parts of a fused layer consecutive."""
    layer = quantized.get(name.removesuffix(".weight"))
    return (name, 0) if layer is None else (layer[0].slices[0].name, layer[1])


def _compress_layer(rows: Mapping[str, Tensor], encoding: str) -> dict[str, Tensor]:
    weight, scales, bits = rows["weight"], rows["scales"], encoding_named(encoding).bits
    if encoding_named(encoding).group_size is None:
        return {"weight": weight, "weight_scale": scales[:, None]}
    codes = weight.int() + (1 << bits - 1)
    codes_per_word = _WORD_BITS // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % codes_per_word)).view(
        len(codes), -1, codes_per_word
    )
    words = torch.zeros(padded.shape[:2], dtype=torch.int32)
    for index in range(codes_per_word):
        words |= padded[..., index] << index * bits
    return {
        "weight_packed": words,
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def _quantization_config(encoding: str, ignored: list[str]) -> dict[str, object]:
    bits, group_size = encoding_named(encoding).bits, encoding_named(encoding).group_size
    weights: dict[str, object] = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
    inputs = None
    if group_size is None:
        weights |= {"strategy": "channel"}
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    else:
        weights |= {"strategy": "group", "group_size": group_size}
    layout = "int-quantized" if group_size is None else "pack-quantized"
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


def _write_tensors(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write tensors to one file, or to several files and their index."""
    shards: list[dict[str, Tensor]] = [{}]
    shard_numbers: dict[str, int] = {}  # tensor name -> number of its file, from 1
    shard_bytes = total_bytes = 0
    for name, tensor in tensors:
        if shard_bytes and shard_bytes + tensor.nbytes > MAX_SHARD_BYTES:
            _save_shard(folder, shards[-1], len(shards))
            shards[-1] = {}
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = tensor
        shard_numbers[name] = len(shards)
        shard_bytes, total_bytes = shard_bytes + tensor.nbytes, total_bytes + tensor.nbytes
    _save_shard(folder, shards[-1], len(shards))
    if len(shards) == 1:
        (folder / _shard_name(1)).rename(folder / SINGLE_FILE)
        return
    weight_map = {name: _shard_name(number) for name, number in shard_numbers.items()}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / SHARD_INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _save_shard(folder: Path, tensors: dict[str, Tensor], shard_number: int) -> None:
    save_file(tensors, folder / _shard_name(shard_number), metadata={"format": "pt"})
    beat()


def _shard_name(shard_number: int) -> str:
    return f"model-{shard_number:05}.safetensors"
