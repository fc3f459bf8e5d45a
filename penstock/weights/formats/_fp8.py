"""Layers of 8-bit floats (E4M3 or E5M2), which several formats store as ``weight`` and a tensor of scales.

There is one scale per matrix, per output, or per block of outputs and inputs. The last blocks of a matrix may
be smaller. A weight is the 8-bit float times its scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.weights.formats import TensorReader
from penstock.weights.formats._stored import LayerHeader, StoredTensors, scale_group_shape

if TYPE_CHECKING:
    from torch import Tensor

LAYOUT = "fp8"
E4M3, E5M2 = "F8_E4M3", "F8_E5M2"
_GROUP_SIZE = 128  # inputs that share a scale in the encoding fp8
_SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")
_SCALES = ("weight_scale_inv", "weight_scale")


def take_fp8_layers(tensors: StoredTensors, block: tuple[int, int]) -> None:
    """Replace the tensors of each layer of 8-bit floats by one header.

    Args:
        tensors: the stored tensors.
        block: numbers of outputs and inputs of a block with one scale; (0, 0) without blocks.

    Raises:
        WeightsError: a weight is not a matrix, or its scales are missing or have a wrong type or shape.
    """
    for layer in tensors.layers("weight", (E4M3, E5M2)):
        weight = tensors.peek(layer, "weight")
        assert weight is not None
        if len(weight.shape) != 2:
            tensors.refuse(
                layer, "weight", f"is {weight.type_name} {list(weight.shape)} where a matrix is needed"
            )
        shape = (weight.shape[0], weight.shape[1])
        name = next((part for part in _SCALES if tensors.peek(layer, part)), _SCALES[1])
        header = tensors.peek(layer, name)
        group_shape = scale_group_shape(header.shape, shape, block) if header else None
        if header is not None and group_shape is None:
            rows, columns = (-(-size // max(part, 1)) for size, part in zip(shape, block, strict=True))
            blocks = f" or [{rows}, {columns}]" if all(block) else ""
            tensors.refuse(
                layer, name, f"is {list(header.shape)} where [1] or [{shape[0]}, 1]{blocks} is needed"
            )
        scales = tensors.take(layer, name, _SCALE_TYPES)
        assert group_shape is not None
        is_exact = weight.type_name == E4M3 and (
            group_shape[1] == shape[1] or group_shape[1] % _GROUP_SIZE == 0
        )
        parts = {"weight": tensors.take(layer, "weight", (E4M3, E5M2)), "scale": scales}
        tensors.put(
            layer, shape, "fp8" if is_exact else None, parts, layout=LAYOUT, bits=8, group_shape=group_shape
        )


def read_fp8(source: TensorReader, header: LayerHeader) -> tuple[str | None, Mapping[str, Tensor]]:
    """Return the encoding and the tensors of a layer; None and a float32 weight if no encoding is exact."""
    import torch

    weight, scales = header.read(source, "weight"), header.read(source, "scale").float()
    (outputs, inputs), (rows, columns) = header.shape, header.group_shape
    blocks = scales.reshape(-(-outputs // rows), -(-inputs // columns)).repeat_interleave(rows, 0)[:outputs]
    if header.encoding is None:
        return None, {"weight": weight.float() * blocks.repeat_interleave(columns, 1)[:, :inputs]}
    num_groups = -(-inputs // _GROUP_SIZE)
    repeats = num_groups if columns == inputs else columns // _GROUP_SIZE
    return header.encoding, {
        "weight": weight.view(torch.uint8),
        "scales": blocks.repeat_interleave(repeats, 1)[:, :num_groups].contiguous(),
    }


def block_size(section: Mapping[str, object], key: str) -> tuple[int, int]:
    """Return ``section[key]``, the outputs and inputs of a block; (0, 0) unless both are integers above 0."""
    value = section.get(key)
    if (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(isinstance(size, int) and size > 0 for size in value)
    ):
        return value[0], value[1]
    return 0, 0
