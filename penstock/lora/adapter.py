"""Reads a LoRA adapter from a PEFT directory and checks each of its tensors against the base model."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from penstock.errors import CheckpointError, UnsupportedFeatureError, WeightsError
from penstock.kernels import PackedLinear, encoding_named, unpack_linear
from penstock.lora.adapter_config import DECODER_PREFIX, AdapterConfig
from penstock.nn.layer_parts import LayerPart, concatenated
from penstock.weights import Weights
from penstock.weights.safetensors import read_header

WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE_FILE = "adapter_model.bin"
_PREFIX = "base_model.model."
_EXPERT = re.compile(r"\.experts\.\d+\.")
_MATRIX_NAME = re.compile(r"(?P<layer>.+)\.lora_(?P<letter>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")
_UNSUPPORTED_KINDS = {
    "lora_magnitude_vector": "DoRA",
    "lora_embedding_": "an adapter on an embedding table",
    "modules_to_save": "fully trained layers in addition to the adapter (modules_to_save)",
    "token_adapter": "trained embeddings of some tokens (trainable_token_indices)",
    "lora_bias": "a bias in the adapter's matrices (lora_bias)",
}
"""Maps a part of a tensor name to the unsupported kind of adapter that has such tensors."""

Rename = Callable[[str], str | None]
"""Maps a tensor name of PEFT's model to the name in the base model, or to None if there is none."""
Layers = Mapping[str, PackedLinear]
"""The linear layers of the base model by their names in the checkpoint. A fused layer has several names."""
Parts = Mapping[str, LayerPart]
"""Maps each layer that is divided among ranks to this rank's part."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The content of an adapter in host memory. Later changes of the files do not affect it."""

    path: str
    digest: bytes
    """Hash of the matrices and the names of their layers. Adapters with equal digests give equal results."""
    matrices: Mapping[str, tuple[Tensor, Tensor]]
    """Maps each layer to A ``[r, in]`` and B ``[out, r]``, in the type of the activations.

    B is already multiplied by the scale. For an embedding table ``[V, E]``, A is ``[r, V]`` and B is
    ``[E, r]``."""


def read_adapter(
    path: str,
    layers: Layers,
    base: Weights,
    dtype: torch.dtype,
    max_rank: int,
    rename: Rename | None = None,
    parts: Parts = MappingProxyType({}),
) -> Adapter:
    """Return the adapter in a PEFT directory, after checking its tensors against the base model.

    Args:
        path: the directory.
        layers: the linear layers of the base model.
        base: the tensors of the base model. If the adapter's file contains copies of them, the copies must be
            equal.
        dtype: the type of the activations.
        max_rank: the maximum rank of an adapter.
        rename: maps the name of a tensor in PEFT's model to its name in the base model, see
            `Weights.renamed`.
        parts: this rank's parts of divided layers. The result always contains whole matrices.

    Raises:
        CheckpointError: the directory or a file in it is missing or damaged.
        WeightsError: tensors match no layer, are missing, have a wrong shape, or contain NaN or infinity.
        UnsupportedFeatureError: the kind of adapter is not supported, its rank exceeds ``max_rank``, or a
            copy of a tensor of the base model differs from this tensor.
    """
    folder = Path(path).expanduser()
    config = AdapterConfig.read(folder)
    file = _weights_file(folder)
    weights = Weights.open(file)
    if rename is not None:
        config = config.with_decoder_prefix(_decoder_prefix(_stored_names(file), rename))
        weights = weights.renamed(lambda name: _base_tensor_name(name, rename))
    matrix_names, copies = _classify_tensors(weights, config, layers)
    adapted_layers = sorted({layer for layer, _ in matrix_names})
    largest_layer = max(adapted_layers, key=config.layer_rank)
    if config.layer_rank(largest_layer) > max_rank:
        raise UnsupportedFeatureError(
            f"rank {config.layer_rank(largest_layer)}",
            f"{config.path} sets this rank for {largest_layer}, and the maximum is {max_rank}: "
            "raise --max-lora-rank",
        )
    _check_copies(folder, weights, copies, layers, base, parts)
    matrices = {}
    for layer in adapted_layers:
        rank, (out_features, in_features) = config.layer_rank(layer), whole_shape(layers, layer, parts)
        down = weights.tensor(
            matrix_names.get((layer, "A"), f"{_PREFIX}{layer}.lora_A.weight"), (rank, in_features)
        )
        up = weights.tensor(
            matrix_names.get((layer, "B"), f"{_PREFIX}{layer}.lora_B.weight"), (out_features, rank)
        )
        scaled_up = up.float() * config.layer_scale(layer)
        # Copied, because the file may change while the adapter is in use.
        matrices[layer] = (down.to(dtype, copy=True), scaled_up.to(dtype))
    weights.finish()
    _check_finite(folder, matrices)
    return Adapter(path, content_digest(matrices), matrices)


def warn_base_model_mismatch(path: str, model: str) -> None:
    """Log a warning if an adapter's configuration names another base model.

    Only the last components of the names are compared. A difference is not an error, because the same model
    can have several names.
    """
    trained_on = AdapterConfig.read(Path(path).expanduser()).base_model
    if trained_on is not None and Path(trained_on).name != Path(model).name:
        logging.getLogger(__name__).warning(
            "the adapter at %s was trained on %s but is applied to %s", path, trained_on, model
        )


def _weights_file(folder: Path) -> Path:
    file = folder / WEIGHTS_FILE
    if file.is_file():
        return file
    if (folder / _PICKLE_FILE).is_file():
        raise CheckpointError(
            folder,
            f"has pickled weights only ({_PICKLE_FILE}), which can run code when read: load the adapter with "
            "peft and save it again, PeftModel.from_pretrained(...).save_pretrained(folder)",
        )
    raise CheckpointError(folder, f"has no {WEIGHTS_FILE}")


def _base_tensor_name(name: str, rename: Rename) -> str:
    """Return an adapter's tensor name, with PEFT's layer name replaced by the base model's layer name."""
    stripped = name.removeprefix(_PREFIX)
    match = _MATRIX_NAME.fullmatch(stripped)
    if match is None:
        return _PREFIX + (rename(stripped) or stripped)
    layer = _base_layer_name(match["layer"], rename)
    return f"{_PREFIX}{layer}{stripped.removeprefix(match['layer'])}"


def _base_layer_name(module: str, rename: Rename) -> str:
    """Return the base model's name of the layer that PEFT's model calls ``module``."""
    return (rename(f"{module}.weight") or f"{module}.weight").removesuffix(".weight")


def _decoder_prefix(names: Iterable[str], rename: Rename) -> str:
    """Return the prefix of decoder layers in PEFT's model. In the base model, the prefix is ``model.``."""
    for name in names:
        if match := _MATRIX_NAME.fullmatch(name.removeprefix(_PREFIX)):
            layer = _base_layer_name(match["layer"], rename)
            name_in_decoder = layer.removeprefix(DECODER_PREFIX)
            if name_in_decoder != layer and match["layer"].endswith(name_in_decoder):
                return match["layer"].removesuffix(name_in_decoder)
    return DECODER_PREFIX


def _stored_names(file: Path) -> list[str]:
    """Return the tensor names of a file, including the prefixes that `Weights` removes."""
    return list(read_header(file))


def _classify_tensors(
    weights: Weights, config: AdapterConfig, layers: Layers
) -> tuple[dict[tuple[str, str], str], list[str]]:
    """Divide the tensors of an adapter's file into LoRA matrices and copies of the base model's tensors.

    Returns:
        For all layers of the adapter, a map from layer and ``A`` or ``B`` to the tensor name; and the names
        of all other tensors, which must be copies.

    Raises:
        WeightsError: a matrix is for an unknown layer, two tensors are the same matrix, a matrix is for a
            layer that the configuration does not include, or the adapter has no matrices.
        UnsupportedFeatureError: a tensor belongs to an unsupported kind of adapter.
    """
    matrix_names: dict[tuple[str, str], str] = {}
    copies: list[str] = []
    unknown_names: list[str] = []
    for name in weights.names:
        match = _MATRIX_NAME.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            _refuse_unsupported_kinds(config.path.parent, name)
            copies.append(name)
        elif match["layer"] not in layers:
            unknown_names.append(name)
        elif (match["layer"], match["letter"]) in matrix_names:
            other_name = matrix_names[match["layer"], match["letter"]]
            raise WeightsError(config.path.parent, f"{name} and {other_name} are the same matrix")
        else:
            matrix_names[match["layer"], match["letter"]] = name
    if unknown_names:
        _refuse_unknown_layers(config.path.parent, unknown_names, sorted(layers))
    # PEFT has no modules for experts that are stacked in one tensor, even if the names of the experts match.
    has_experts = any(_EXPERT.search(layer) for layer, _ in matrix_names)
    for layer in layers:  # add the expected names, so that `Weights.tensor` reports missing matrices
        if config.targets(layer) and (has_experts or not _EXPERT.search(layer)):
            for letter in "AB":
                matrix_names.setdefault((layer, letter), f"{_PREFIX}{layer}.lora_{letter}.weight")
    excluded_layers = [
        layer for layer, _ in matrix_names if config.target_modules is not None and not config.targets(layer)
    ]
    if excluded_layers:
        raise WeightsError(
            config.path.parent,
            f"has matrices for {excluded_layers[0]}, which target_modules does not include",
        )
    if not matrix_names:
        raise WeightsError(config.path.parent, "has no matrices for any layer of the model")
    return matrix_names, copies


def _refuse_unsupported_kinds(folder: Path, name: str) -> None:
    for part, meaning in _UNSUPPORTED_KINDS.items():
        if part in name:
            raise UnsupportedFeatureError(meaning, f"{folder} has a tensor {name}")
    if name.endswith(".bias"):
        raise UnsupportedFeatureError("a bias trained with the adapter", f"{folder} has a tensor {name}")


def _refuse_unknown_layers(folder: Path, names: Sequence[str], layers: Sequence[str]) -> None:
    layer = names[0].removeprefix(_PREFIX).partition(".lora_")[0]
    nearest = get_close_matches(layer, layers, n=1, cutoff=0)
    others_text = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    raise WeightsError(
        folder,
        f"{names[0]}{others_text} is for {layer}, which is not a linear layer that adapters can change; "
        f"the nearest is {nearest[0]}",
    )


def _check_copies(
    folder: Path, weights: Weights, names: Sequence[str], layers: Layers, base: Weights, parts: Parts
) -> None:
    """Check that the copies in an adapter's file equal the tensors of the base model.

    If an adapter changes the head or the embedding, PEFT saves copies of both in the adapter's file.
    """
    for name in names:
        base_name = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
        layer = base_name.removesuffix(".weight")
        if base_name in base:
            base_tensor = base.tensor(base_name, base.shape(base_name))
        elif layer in layers:  # a tied head, which has no tensor in the checkpoint
            base_tensor = _unpacked_weight(layers, layer)
        else:
            raise WeightsError(folder, f"{name} is neither part of an adapter nor a tensor of the model")
        is_part = base_name not in base and layer in parts
        shape = whole_shape(layers, layer, parts) if is_part else tuple(base_tensor.shape)
        if weights.shape(name) != shape:
            raise UnsupportedFeatureError(
                f"a resized {base_name}",
                f"its shape is {list(weights.shape(name))} in {folder} and {list(shape)} in the model",
            )
        copy = weights.tensor(name, shape)
        if is_part:  # each rank compares its own part
            copy = concatenated(parts[layer].slice_weight(copy))
        is_equal = torch.equal(copy.to(base_tensor.dtype), base_tensor) or torch.equal(
            copy, base_tensor.to(copy.dtype)
        )
        if not is_equal and base_name not in base:  # packing has rounded the weights of the head
            is_equal = torch.equal(_as_packed(copy, layers[layer]), base_tensor)
        if not is_equal:
            raise UnsupportedFeatureError(
                f"a retrained {base_name}", f"{folder} would replace this tensor for all requests"
            )


def _output_slice(layers: Layers, layer: str) -> slice:
    part = next(part for part in layers[layer].slices if part.name == layer)
    return slice(part.start, part.stop)


def whole_shape(layers: Layers, layer: str, parts: Parts) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a whole layer of the base model, over all ranks."""
    part = parts.get(layer)
    return layer_shape(layers, layer) if part is None else (part.out_features, part.in_features)


def layer_shape(layers: Layers, layer: str) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of this rank's part of a layer of the base model."""
    part = _output_slice(layers, layer)
    return part.stop - part.start, layers[layer].in_features


def _unpacked_weight(layers: Layers, layer: str) -> Tensor:  # [out, in]
    return unpack_linear(layers[layer])[_output_slice(layers, layer)].cpu()


def _as_packed(weight: Tensor, packed: PackedLinear) -> Tensor:  # [out, in] -> [out, in]
    """Return a weight after packing it in the encoding of ``packed`` and unpacking it."""
    encoding = encoding_named(packed.encoding)
    return encoding.unpack(encoding.pack(weight.to(encoding.compute_dtype.to_torch())))


def _check_finite(folder: Path, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    for layer, pair in matrices.items():
        for letter, matrix in zip("AB", pair, strict=True):
            if not matrix.isfinite().all():
                raise WeightsError(folder, f"lora_{letter} of {layer} contains NaN or infinite numbers")


def content_digest(matrices: Mapping[str, tuple[Tensor, Tensor]]) -> bytes:
    """Return the `Adapter.digest` of these matrices."""
    content = blake2b(digest_size=32)
    for layer, pair in matrices.items():
        for matrix in pair:
            content.update(f"{layer} {tuple(matrix.shape)} {matrix.dtype}\n".encode())
            content.update(matrix.contiguous().view(torch.uint8).numpy().data)
    return content.digest()
