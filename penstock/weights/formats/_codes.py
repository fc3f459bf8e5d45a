"""Layers of integer codes with scales and zero points, as in GPTQ, AWQ and compressed-tensors.

Codes of up to 4 bits are read in the encoding uint4, codes of 5 to 8 bits in uint8. A group must have a
multiple of 32 inputs, or all inputs. Layers with other group sizes or with zero points above 255 are
dequantized to floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from penstock.weights.formats._stored import GROUP_SIZE_MULTIPLE, StoredTensors
from penstock.weights.safetensors import read_tensor_bytes

if TYPE_CHECKING:
    from torch import Tensor

MAX_BITS = 8


def exact_encoding(bits: int, group_size: int, in_features: int) -> str | None:
    """Return the encoding that represents codes exactly; None if no encoding supports the group size."""
    if group_size % GROUP_SIZE_MULTIPLE and group_size < in_features:
        return None
    return "uint4" if bits <= 4 else "uint8"


def find_input_order(
    encoding: str | None, tensors: StoredTensors, layer: str, part: str, group_size: int, num_groups: int
) -> tuple[str | None, bytes]:
    """Return the encoding of a layer whose inputs may not be sorted by group, and its input order.

    Args:
        encoding: the encoding of the layer after its inputs are sorted by group; None for floats.
        tensors: the stored tensors.
        layer: the name of the layer.
        part: the name of the tensor with the group of each input, integers ``[in]``.
        group_size: number of inputs in a group; the last group may be smaller.
        num_groups: number of groups.

    Returns:
        The encoding, and the `QuantizedHeader.input_order`. The order is empty if the inputs are already
        sorted by group, if the encoding is None, or if ``part`` is neither int32 nor int64. The encoding is
        None if ``encoding`` is None, or if a group other than the last one does not have ``group_size``
        inputs.

    Raises:
        WeightsError: a group does not exist.
    """
    header = tensors.peek(layer, part)
    assert header is not None
    index_type = {"I32": "<i4", "I64": "<i8"}.get(header.type_name)
    if index_type is None:
        return encoding, b""  # the caller's `StoredTensors.take_optional` refuses other types
    input_groups = np.frombuffer(read_tensor_bytes(header), index_type)
    in_features = len(input_groups)
    if not 0 <= int(input_groups.min()) <= int(input_groups.max()) < num_groups:
        tensors.refuse(layer, part, "refers to groups that do not exist")
    counts = np.bincount(input_groups, minlength=num_groups)
    last_group_size = in_features - group_size * (num_groups - 1)
    is_regular = bool((counts[:-1] == group_size).all()) and int(counts[-1]) == last_group_size
    if encoding is None or not is_regular:
        return None, b""
    order = np.argsort(input_groups, kind="stable").astype(np.int32)
    is_sorted = bool((order == np.arange(in_features)).all())
    return encoding, b"" if is_sorted else order.tobytes()


def read_codes(
    encoding: str | None,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    group_size: int,
    input_groups: Tensor | None = None,
) -> tuple[str | None, Mapping[str, Tensor]]:
    """Return the encoding and the tensors of a layer of codes; None and the float weight if dequantized.

    A layer is dequantized if ``encoding`` is None, or if a zero point is above 255.

    Args:
        encoding: the result of `exact_encoding` for the layer; None for floats.
        codes: uint8 ``[out, in]``.
        scales: floats ``[out, G]``.
        zeros: the zero points, integers ``[out, G]``.
        group_size: number of inputs in a group.
        input_groups: the group of each input ``[in]``, if the inputs are not sorted by group. It is used only
            if the result is floats. Otherwise the caller has sorted the codes.
    """
    import torch

    from penstock.kernels.codes import group_codes

    in_features = codes.shape[1]
    if encoding is not None and int(zeros.max()) < 256:
        if group_size >= in_features:
            group_size = -(-in_features // GROUP_SIZE_MULTIPLE) * GROUP_SIZE_MULTIPLE
        return encoding, group_codes(codes, scales, zeros, group_size)
    groups = torch.arange(in_features) // group_size if input_groups is None else input_groups.long()
    weight = (codes.float() - zeros.float()[:, groups]) * scales.float()[:, groups]
    return None, {"weight": weight}
