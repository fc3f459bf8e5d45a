"""compressed-tensors: integers, 8-bit floats and 4-bit floats with scales.

``quantization_config.config_groups`` assigns layers to groups with common settings. The tensors of a layer
determine its type:

* ``weight_packed`` int32: codes of 1 to 8 bits, the first in the lowest bits of an int32. A code of b bits is
  the integer plus 2^(b - 1). A code can span two of them. In files of older writers, each int32 contains only
  whole codes, and its remaining bits are unused. ``weight_shape`` is ``(out, in)``. ``weight_zero_point`` is
  packed like ``weight_packed``, but along its outputs.
* ``weight`` int8 or 8-bit floats with ``weight_scale``.
* ``weight_packed`` uint8: 4-bit floats, see `penstock.weights.formats._fp4`.

``weight_g_idx`` contains the group of each input, if inputs are not sorted by group (``actorder``). The
reader sorts the inputs of these layers by group (`QuantizedHeader.input_order`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, WeightsError
from penstock.weights.formats import Headers, TensorReader, quant_method, quantization_section
from penstock.weights.formats._codes import MAX_BITS, exact_encoding, find_input_order, read_codes
from penstock.weights.formats._fp4 import read_fp4, take_fp4_layers
from penstock.weights.formats._fp8 import block_size, read_fp8, take_fp8_layers
from penstock.weights.formats._stored import (
    FLOATS,
    LayerHeader,
    StoredFormat,
    StoredTensors,
    scale_group_shape,
    unpack_bits,
)
from penstock.weights.safetensors import TensorHeader

if TYPE_CHECKING:
    from torch import Tensor

_WORD_BITS = 32


class CompressedTensorsFormat(StoredFormat):
    """Layers of integers, 8-bit floats and 4-bit floats, written by compressed-tensors."""

    name = "compressed_tensors"
    quant_methods = ("compressed-tensors",)
    kept_encodings = ("uint4", "uint8", "int8", "fp8", "nvfp4", "mxfp4")

    def detect(self, config: Mapping[str, object], headers: Headers) -> bool:
        return quant_method(config) in self.quant_methods

    def headers(self, config: Mapping[str, object], stored: Headers) -> Headers:
        section = quantization_section(config)
        _refuse_transforms(section)
        config_groups = _as_mapping(section.get("config_groups")).values()
        groups = [group for group in config_groups if isinstance(group, Mapping)]
        tensors = StoredTensors(stored, self.name)
        for layer in tensors.layers("weight_packed", ("I32",)):
            _take_packed(tensors, layer, _weight_options(groups, layer))
        for layer in tensors.layers("weight", ("I8",)):
            _take_integers(tensors, layer)
        blocks = {block_size(_as_mapping(group.get("weights")), "block_structure") for group in groups} - {
            (0, 0)
        }
        take_fp8_layers(tensors, blocks.pop() if len(blocks) == 1 else (0, 0))
        take_fp4_layers(tensors)
        return tensors.remaining

    def read_linear(
        self, source: TensorReader, header: TensorHeader
    ) -> tuple[str | None, Mapping[str, Tensor]]:
        if not isinstance(header, LayerHeader):
            return super().read_linear(source, header)
        readers = {"packed": _read_packed, "integers": _read_integers, "fp8": read_fp8}
        return readers.get(header.layout, read_fp4)(source, header)


FORMAT = CompressedTensorsFormat()


def _refuse_transforms(section: Mapping[str, object]) -> None:
    """Raise an error if the weights of a checkpoint require operations other than scaling.

    Raises:
        ConfigError: weights are sparse, or activations must be transformed.
    """
    sparsity = _as_mapping(section.get("sparsity_config")).get("format", "dense")
    if sparsity != "dense":
        raise ConfigError("quantization_config", f"{sparsity} weights cannot be read: use a dense model")
    if _as_mapping(section.get("transform_config")).get("config_groups"):
        raise ConfigError("quantization_config", "models with transforms of activations cannot be read")


def _weight_options(groups: list[Mapping[str, object]], layer: str) -> Mapping[str, object]:
    """Return the settings of a layer's weight from its group; an empty mapping if no group has the layer.

    If several groups have a target for the layer, a target that is the name of the layer, or the last part of
    the name, has precedence over a regular expression, and a regular expression over the class ``Linear``.
    """

    def precedence(target: str) -> int:
        if target.startswith("re:"):
            return 2 if re.match(target.removeprefix("re:"), layer) else 0
        return 3 if layer == target or layer.endswith(f".{target}") else 1 if target == "Linear" else 0

    best_match: tuple[int, Mapping[str, object]] = (0, {})
    for group in groups:
        targets = group.get("targets")
        for target in targets if isinstance(targets, list) else ():
            candidate = (precedence(str(target)), _as_mapping(group.get("weights")))
            best_match = max(best_match, candidate, key=lambda pair: pair[0])
    return best_match[1]


def _take_packed(tensors: StoredTensors, layer: str, weights: Mapping[str, object]) -> None:
    packed, scale = tensors.peek(layer, "weight_packed"), tensors.peek(layer, "weight_scale")
    assert packed is not None
    bits = weights.get("num_bits")
    if not isinstance(bits, int) or not 1 <= bits <= MAX_BITS:
        tensors.refuse(
            layer, "weight_packed", f"has num_bits {bits!r} in config_groups: 1 to {MAX_BITS} can be read"
        )
    assert isinstance(bits, int)
    if len(packed.shape) != 2 or scale is None or len(scale.shape) != 2 or scale.shape[0] != packed.shape[0]:
        tensors.refuse(
            layer, "weight_packed", "and weight_scale must be matrices with one row for each output"
        )
    assert scale is not None
    outputs, num_groups, configured_group_size = packed.shape[0], scale.shape[1], weights.get("group_size")
    inputs = packed.shape[1] * _WORD_BITS // bits
    if num_groups > 1:
        if (
            not isinstance(configured_group_size, int)
            or configured_group_size < 1
            or packed.shape[1] not in _num_words(num_groups * configured_group_size, bits)
        ):
            tensors.refuse(
                layer,
                "weight_scale",
                f"is {list(scale.shape)}, which does not match {inputs} inputs in groups of "
                f"{configured_group_size!r}",
            )
        assert isinstance(configured_group_size, int)
        inputs = num_groups * configured_group_size
    shape = (outputs, inputs)
    group_size = inputs if num_groups == 1 else inputs // num_groups
    encoding, input_order = exact_encoding(bits, group_size, inputs), b""
    input_groups = tensors.peek(layer, "weight_g_idx")
    if input_groups is not None and input_groups.shape == (inputs,):
        encoding, input_order = find_input_order(
            encoding, tensors, layer, "weight_g_idx", group_size, num_groups
        )
    parts = {
        "packed": tensors.take(layer, "weight_packed", ("I32",)),
        "scale": tensors.take(layer, "weight_scale", FLOATS),
        "zero": tensors.take_optional(
            layer, "weight_zero_point", ("I32",), *((rows, num_groups) for rows in _num_words(outputs, bits))
        ),
        "shape": tensors.take_optional(layer, "weight_shape", ("I64", "I32"), (2,)),
        "input_groups": tensors.take_optional(layer, "weight_g_idx", ("I32", "I64"), (inputs,)),
    }
    tensors.put(
        layer,
        shape,
        encoding,
        parts,
        layout="packed",
        bits=bits,
        group_shape=(1, group_size),
        input_order=input_order,
    )


def _read_packed(source: TensorReader, header: LayerHeader) -> tuple[str | None, Mapping[str, Tensor]]:
    import torch

    (outputs, inputs), bits = header.shape, header.bits
    if header.part("shape"):
        stored_shape = tuple(header.read(source, "shape").tolist())
        if stored_shape != header.shape:
            raise WeightsError(
                header.file,
                f"{header.stored_name} has shape {list(header.shape)}, "
                f"but weight_shape is {list(stored_shape)}",
            )
    codes = _unpack_words(header.read(source, "packed"), bits, inputs)
    scales = header.read(source, "scale").float()
    if header.part("zero"):
        zeros = _unpack_words(header.read(source, "zero").T.contiguous(), bits, outputs).T
    else:
        zeros = torch.full(scales.shape, 1 << bits - 1)
    groups = header.read(source, "input_groups") if header.part("input_groups") else None
    if groups is not None and not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1]:
        raise WeightsError(
            header.file, f"{header.stored_name}: weight_g_idx refers to groups that do not exist"
        )
    codes = header.sorted_inputs(codes)
    return read_codes(header.encoding, codes, scales, zeros, header.group_shape[1], groups)


def _unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first ``count`` codes in each row of words, uint8 ``[rows, count]``."""
    import torch

    if words.shape[1] == _num_words(count, bits)[0]:
        return unpack_bits(words, bits, count)
    shifts = torch.arange(_WORD_BITS // bits) * bits
    codes = words[..., None] >> shifts & (1 << bits) - 1
    return codes.flatten(1)[:, :count].to(torch.uint8)


def _num_words(count: int, bits: int) -> tuple[int, int]:
    """Return the numbers of words for ``count`` codes: with codes that span two words, and without."""
    return -(-count * bits // _WORD_BITS), -(-count // (_WORD_BITS // bits))


def _take_integers(tensors: StoredTensors, layer: str) -> None:
    weight, scale = tensors.peek(layer, "weight"), tensors.peek(layer, "weight_scale")
    assert weight is not None
    if len(weight.shape) != 2:
        return
    shape = (weight.shape[0], weight.shape[1])
    num_groups = scale.shape[1] if scale is not None and len(scale.shape) == 2 else 1
    group_size = -(-shape[1] // max(num_groups, 1))
    group_shape = None if scale is None else scale_group_shape(scale.shape, shape, (1, group_size))
    if scale is not None and group_shape is None:
        tensors.refuse(layer, "weight_scale", f"is {list(scale.shape)} for a weight of {list(shape)}")
    scale_header = tensors.take(layer, "weight_scale", FLOATS)
    zero = tensors.take_optional(layer, "weight_zero_point", ("I8", "I32"), scale_header.shape)
    assert group_shape is not None
    is_plain = group_shape[1] == shape[1] and zero is None
    encoding = "int8" if is_plain else exact_encoding(8, group_shape[1], shape[1])
    parts = {"weight": tensors.take(layer, "weight", ("I8",)), "scale": scale_header, "zero": zero}
    tensors.put(layer, shape, encoding, parts, layout="integers", bits=8, group_shape=group_shape)


def _read_integers(source: TensorReader, header: LayerHeader) -> tuple[str | None, Mapping[str, Tensor]]:
    import torch

    weight, scales = header.read(source, "weight"), header.read(source, "scale").float()
    outputs, columns = header.shape[0], -(-header.shape[1] // header.group_shape[1])
    scales = scales.reshape(-1, columns).expand(outputs, columns)
    if header.encoding == "int8":
        return "int8", {"weight": weight, "scales": scales[:, 0].contiguous()}
    zeros = header.read(source, "zero").int() if header.part("zero") else torch.zeros(1, 1, dtype=torch.int32)
    zeros = (zeros.reshape(-1, zeros.shape[-1] if zeros.dim() > 1 else 1) + 128).expand(outputs, columns)
    codes = (weight.short() + 128).to(torch.uint8)
    return read_codes(header.encoding, codes, scales, zeros, header.group_shape[1])


def _as_mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
