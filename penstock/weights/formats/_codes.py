"""Layers of integer codes with scales and zero points, as in GPTQ, AWQ and compressed-tensors.

Codes of up to 4 bits are read in the encoding uint4, codes of 5 to 8 bits in uint8. A group must have a
multiple of 32 inputs, or all inputs. Layers with other group sizes or with zero points above 255 are
dequantized to floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from penstock.weights.formats._stored import GROUP, StoredTensors
from penstock.weights.safetensors import read_tensor_bytes

if TYPE_CHECKING:
    from torch import Tensor

MAX_BITS = 8


def exact_encoding(bits: int, group_size: int, in_features: int) -> str | None:
    """Return the encoding that represents codes of these sizes exactly; None if there is none."""
    if group_size % GROUP and group_size < in_features:
        return None
    return "uint4" if bits <= 4 else "uint8"


def find_input_order(
    encoding: str | None, tensors: StoredTensors, layer: str, part: str, size: int, groups: int
) -> tuple[str | None, bytes]:
    """Return the encoding of a layer whose inputs may not be sorted by group, and its input order.

    Args:
        encoding: the encoding of the layer after its inputs are sorted by group; None for floats.
        tensors: the stored tensors.
        layer: the name of the layer.
        part: the name of the tensor with the group of each input, integers ``[in]``.
        size: number of inputs in a group; the last group may be smaller.
        groups: number of groups.

    Returns:
        The encoding, and the order for `QuantizedHeader.order`; the order is empty if the inputs are sorted,
        the encoding is None, or the groups have an unsupported type. The encoding is None if ``encoding`` is
        None, or if a group other than the last one does not have ``size`` inputs.

    Raises:
        WeightsError: a group does not exist.
    """
    header = tensors.peek(layer, part)
    assert header is not None
    kind = {"I32": "<i4", "I64": "<i8"}.get(header.type_name)
    if kind is None:
        return encoding, b""  # `StoredTensors.take` refuses other types
    input_groups = np.frombuffer(read_tensor_bytes(header), kind)
    inputs = len(input_groups)
    if not 0 <= int(input_groups.min()) <= int(input_groups.max()) < groups:
        tensors.refuse(layer, part, "refers to groups that do not exist")
    counts = np.bincount(input_groups, minlength=groups)
    is_regular = bool((counts[:-1] == size).all()) and int(counts[-1]) == inputs - size * (groups - 1)
    if encoding is None or not is_regular:
        return None, b""
    order = np.argsort(input_groups, kind="stable").astype(np.int32)
    is_sorted = bool((order == np.arange(inputs)).all())
    return encoding, b"" if is_sorted else order.tobytes()


def read_codes(
    encoding: str | None,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    group_size: int,
    groups: Tensor | None = None,
) -> tuple[str | None, Mapping[str, Tensor]]:
    """Return the encoding and the tensors of a layer of codes; None and the float weight if dequantized.

    Args:
        encoding: the result of `exact_encoding` for the layer; None for floats.
        codes: uint8 ``[out, in]``.
        scales: floats ``[out, G]``.
        zeros: integers ``[out, G]``.
        group_size: number of inputs in a group.
        groups: the group of each input ``[in]``, if the inputs are not sorted by group. It is used only if
            the result is floats. Otherwise the caller has sorted the codes.
    """
    import torch

    from penstock.kernels.codes import group_codes

    inputs = codes.shape[1]
    if encoding is not None and int(zeros.max()) < 256:
        width = -(-inputs // GROUP) * GROUP if group_size >= inputs else group_size
        return encoding, group_codes(codes, scales, zeros, width)
    groups = torch.arange(inputs) // group_size if groups is None else groups.long()
    weight = (codes.float() - zeros.float()[:, groups]) * scales.float()[:, groups]
    return None, {"weight": weight}
