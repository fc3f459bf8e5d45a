"""A LoRA adapter as it is read from a PEFT directory, every tensor of it held against the base model."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import CheckpointError, UnsupportedFeatureError, WeightsError
from penstock.kernels import PackedLinear, encoding_named, unpack_linear
from penstock.lora.adapter_config import AdapterConfig
from penstock.weights import Weights

WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_PREFIX = "base_model.model."
_HALF = re.compile(r"(?P<layer>.+)\.lora_(?P<half>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")
_OTHER_KINDS = {
    "lora_magnitude_vector": "DoRA",
    "lora_embedding_": "an adapter on an embedding table",
    "modules_to_save": "a fully trained layer beside the adapter (modules_to_save)",
    "token_adapter": "a trained embedding of some tokens (trainable_token_indices)",
    "lora_bias": "a bias in the adapter's matrices (lora_bias)",
}
"""Parts of tensor names that belong to kinds of adapters that are not applied here."""

Layers = Mapping[str, PackedLinear]
"""The linear layers of the base model, by their names in the checkpoint; a fused one under each name."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The content of an adapter, in the host's memory. It stays as it is, whatever happens to the files."""

    path: str
    digest: bytes
    """Stands for all that changes a result: equal digests, equal results."""
    matrices: Mapping[str, tuple[Tensor, Tensor]]
    """Layer -> A ``[r, in]``, B ``[out, r]`` with the scale in it, in the type of the activations."""


def read_adapter(path: str, layers: Layers, base: Weights, dtype: torch.dtype, max_rank: int) -> Adapter:
    """Reads a PEFT directory, and refuses it unless all of it can be applied to the base model.

    Args:
        path: the directory.
        layers: the linear layers of the base model.
        base: its tensors: an adapter's file may hold copies of them, which must be equal.
        dtype: the type of the activations.
        max_rank: the largest rank there is room for.

    Raises:
        CheckpointError: the directory or a file of it is missing or damaged.
        WeightsError: tensors fit no layer, or are missing or misshapen; lists all of them.
        UnsupportedFeatureError: it is an adapter of a kind that cannot be applied.
    """
    folder = Path(path).expanduser()
    config = AdapterConfig.read(folder)
    weights = Weights.open(_weights_file(folder))
    keys, copies = _sorted_out(weights, config, layers)
    adapted = sorted({layer for layer, _ in keys})
    largest = max(adapted, key=config.rank_of)
    if config.rank_of(largest) > max_rank:
        raise UnsupportedFeatureError(
            f"rank {config.rank_of(largest)}",
            f"{config.path} asks for it, for {largest}, and there is room for rank {max_rank}: "
            "raise --max-lora-rank",
        )
    _check_copies(folder, weights, copies, layers, base)
    matrices = {}
    for layer in adapted:
        rank, (out_features, in_features) = config.rank_of(layer), layer_shape(layers, layer)
        down = weights.tensor(keys.get((layer, "A"), f"{_PREFIX}{layer}.lora_A.weight"), (rank, in_features))
        up = weights.tensor(keys.get((layer, "B"), f"{_PREFIX}{layer}.lora_B.weight"), (out_features, rank))
        scaled = up.float() * config.scale_of(layer)
        matrices[layer] = (down.to(dtype, copy=True), scaled.to(dtype))  # copies: files may change
    weights.finish()
    _check_finite(folder, matrices)
    return Adapter(path, _digest(matrices), matrices)


def warn_of_another_base(path: str, model: str) -> None:
    """Says so where an adapter names another base model than the one it is used with: names prove nothing."""
    trained_on = AdapterConfig.read(Path(path).expanduser()).base_model
    if trained_on is not None and Path(trained_on).name != Path(model).name:
        logging.getLogger(__name__).warning(
            "the adapter at %s was trained on %s, and is applied to %s", path, trained_on, model
        )


def _weights_file(folder: Path) -> Path:
    file = folder / WEIGHTS_FILE
    if file.is_file():
        return file
    if (folder / _PICKLE).is_file():
        raise CheckpointError(
            folder,
            f"has pickled weights only ({_PICKLE}), which can run code when read: load the adapter with "
            "peft and save it again, PeftModel.from_pretrained(...).save_pretrained(folder)",
        )
    raise CheckpointError(folder, f"has no {WEIGHTS_FILE}")


def _sorted_out(
    weights: Weights, config: AdapterConfig, layers: Layers
) -> tuple[dict[tuple[str, str], str], list[str]]:
    """(Layer, half) -> name in the file, of all layers the adapter is for; and names of the base's own."""
    keys: dict[tuple[str, str], str] = {}
    copies: list[str] = []
    strangers: list[str] = []
    for name in weights.names:
        match = _HALF.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            _refuse_other_kinds(config.path.parent, name)
            copies.append(name)
        elif match["layer"] not in layers:
            strangers.append(name)
        elif (match["layer"], match["half"]) in keys:
            raise WeightsError(
                config.path.parent, f"{name} and {keys[match['layer'], match['half']]} are the same"
            )
        else:
            keys[match["layer"], match["half"]] = name
    if strangers:
        _refuse_strangers(config.path.parent, strangers, sorted(layers))
    for layer in layers:  # one that the adapter is for, and has nothing for, is missing
        if config.targets(layer):
            for half in "AB":
                keys.setdefault((layer, half), f"{_PREFIX}{layer}.lora_{half}.weight")
    aside = [layer for layer, _ in keys if config.target_modules is not None and not config.targets(layer)]
    if aside:
        raise WeightsError(
            config.path.parent, f"has matrices for {aside[0]}, which its target_modules leave out"
        )
    if not keys:
        raise WeightsError(config.path.parent, "has no matrices for any layer of the model")
    return keys, copies


def _refuse_other_kinds(folder: Path, name: str) -> None:
    for part, meaning in _OTHER_KINDS.items():
        if part in name:
            raise UnsupportedFeatureError(meaning, f"{folder} has a tensor {name}")
    if name.endswith(".bias"):
        raise UnsupportedFeatureError("a bias trained with the adapter", f"{folder} has a tensor {name}")


def _refuse_strangers(folder: Path, names: Sequence[str], layers: Sequence[str]) -> None:
    layer = names[0].removeprefix(_PREFIX).partition(".lora_")[0]
    nearest = get_close_matches(layer, layers, n=1, cutoff=0)
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    raise WeightsError(
        folder,
        f"{names[0]}{more} is for {layer}, which is no linear layer of the model; the nearest is "
        f"{nearest[0]}",
    )


def _check_copies(
    folder: Path, weights: Weights, names: Sequence[str], layers: Layers, base: Weights
) -> None:
    """PEFT saves head and embedding along where an adapter is on one of them: they must be the base's own."""
    for name in names:
        own = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
        layer = own.removesuffix(".weight")
        if own in base:
            expected = base.tensor(own, base.shape(own))
        elif layer in layers:  # a tied head has no tensor
            expected = _unpacked(layers, layer)
        else:
            raise WeightsError(folder, f"{name} is neither part of an adapter nor a tensor of the model")
        if weights.shape(name) != tuple(expected.shape):
            raise UnsupportedFeatureError(
                f"a resized {own}",
                f"{folder} has it of {list(weights.shape(name))}, the model of {list(expected.shape)}",
            )
        copy = weights.tensor(name, tuple(expected.shape))
        is_equal = torch.equal(copy.to(expected.dtype), expected) or torch.equal(
            copy, expected.to(copy.dtype)
        )
        if not is_equal and own not in base:  # the head was rounded as it was packed: so is the copy
            is_equal = torch.equal(_as_packed(copy, layers[layer]), expected)
        if not is_equal:
            raise UnsupportedFeatureError(
                f"a retrained {own}", f"{folder} replaces the base model's, for all requests"
            )


def _part(layers: Layers, layer: str) -> slice:
    part = next(part for part in layers[layer].slices if part.name == layer)
    return slice(part.start, part.stop)


def layer_shape(layers: Layers, layer: str) -> tuple[int, int]:
    """Outputs and inputs of a layer of the base model."""
    part = _part(layers, layer)
    return part.stop - part.start, layers[layer].in_features


def _unpacked(layers: Layers, layer: str) -> Tensor:  # [out, in]
    return unpack_linear(layers[layer])[_part(layers, layer)].cpu()


def _as_packed(weight: Tensor, packed: PackedLinear) -> Tensor:  # [out, in], of either
    """What would be left of a weight, had it been packed in the encoding of another."""
    encoding = encoding_named(packed.encoding)
    return encoding.unpack(encoding.pack(weight.to(encoding.compute_dtype.to_torch())))


def _check_finite(folder: Path, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    for layer, pair in matrices.items():
        for half, matrix in zip("AB", pair, strict=True):
            if not matrix.isfinite().all():
                raise WeightsError(folder, f"lora_{half} of {layer} has numbers that are not finite")


def _digest(matrices: Mapping[str, tuple[Tensor, Tensor]]) -> bytes:
    content = blake2b(digest_size=32)
    for layer, pair in matrices.items():
        for matrix in pair:
            content.update(f"{layer} {tuple(matrix.shape)} {matrix.dtype}\n".encode())
            content.update(matrix.contiguous().view(torch.uint8).numpy().data)
    return content.digest()
