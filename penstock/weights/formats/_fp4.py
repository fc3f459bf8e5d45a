"""Layers of 4-bit floats (E2M1) with a scale per 16 or 32 inputs: NVFP4 and MXFP4.

A byte contains two numbers, the first in its lower half. NVFP4 has a scale (E4M3) per 16 inputs and a float32
scale per matrix. In compressed-tensors a weight is divided by the float32 scale (``weight_global_scale``), in
ModelOpt a weight is multiplied by the float32 scale (``weight_scale_2``). MXFP4 has a power of two per 32
inputs, stored as its exponent plus 127. The encodings nvfp4 and mxfp4 represent these layers exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.weights.formats import TensorReader
from penstock.weights.formats._stored import LayerHeader, StoredTensors

if TYPE_CHECKING:
    from torch import Tensor

LAYOUT = "fp4"
_NVFP4_GROUP_SIZE, _MXFP4_GROUP_SIZE = 16, 32  # inputs that share a scale


def take_fp4_layers(tensors: StoredTensors, name: str = "weight_packed") -> None:
    """Replace the tensors of each layer of 4-bit floats by one header.

    Tensors that are not matrices stay unchanged. If ``name`` is ``weight``, a layer without ``weight_scale``
    also stays unchanged, because it does not consist of 4-bit floats.

    Args:
        tensors: the stored tensors.
        name: the tensor of 4-bit floats: ``weight_packed`` in compressed-tensors, ``weight`` in ModelOpt.

    Raises:
        WeightsError: a scale of a layer is missing or has a wrong type or shape, or the number of inputs is
            not a multiple of the inputs per scale.
    """
    for layer in tensors.layers(name, ("U8",)):
        packed, scale = tensors.peek(layer, name), tensors.peek(layer, "weight_scale")
        assert packed is not None
        if len(packed.shape) != 2 or (scale is None and name == "weight"):
            continue
        outputs, inputs = packed.shape[0], 2 * packed.shape[1]
        is_mxfp4 = scale is not None and scale.type_name in ("U8", "F8_E8M0")
        group_size = _MXFP4_GROUP_SIZE if is_mxfp4 else _NVFP4_GROUP_SIZE
        types = ("U8", "F8_E8M0") if is_mxfp4 else ("F8_E4M3",)
        parts = {
            "scale": tensors.take(layer, "weight_scale", types, (outputs, inputs // group_size)),
            "divisor": tensors.take_optional(layer, "weight_global_scale", ("F32",), (), (1,)),
            "factor": tensors.take_optional(layer, "weight_scale_2", ("F32",), (), (1,)),
        }
        has_global_scale = parts["divisor"] is not None or parts["factor"] is not None
        if inputs % group_size or not (is_mxfp4 or has_global_scale):
            tensors.refuse(
                layer,
                name,
                f"has {inputs} inputs and needs one scale per {group_size} inputs and one global scale",
            )
        parts["packed"] = tensors.take(layer, name, ("U8",))
        encoding = "mxfp4" if is_mxfp4 else "nvfp4"
        tensors.put(
            layer, (outputs, inputs), encoding, parts, layout=LAYOUT, bits=4, group_shape=(1, group_size)
        )


def read_fp4(source: TensorReader, header: LayerHeader) -> tuple[str | None, Mapping[str, Tensor]]:
    """Return the encoding of a layer of 4-bit floats and its tensors."""
    import torch

    packed = header.read(source, "packed")
    rows = {
        "weight": torch.stack([packed & 15, packed >> 4], dim=2).flatten(1),
        "scales": header.read(source, "scale").view(torch.uint8),
    }
    if header.group_shape[1] == _NVFP4_GROUP_SIZE:
        factor = torch.ones(())
        if header.part("divisor"):
            factor = factor / header.read(source, "divisor").reshape(())
        if header.part("factor"):
            factor = factor * header.read(source, "factor").reshape(())
        rows["row_scales"] = factor.expand(len(packed)).contiguous()
    return header.encoding, rows
