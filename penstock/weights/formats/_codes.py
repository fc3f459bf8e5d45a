"""Layers of integer codes with scales and zero points, as GPTQ, AWQ and compressed-tensors store them.

Codes of up to 4 bits are read in the encoding uint4, those of up to 8 bits in uint8. Groups must be a
multiple of 32 inputs. Other layers are widened to floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.weights.formats._stored import GROUP

if TYPE_CHECKING:
    from torch import Tensor

MAX_BITS = 8


def encoding_of(bits: int, group_size: int, in_features: int) -> str | None:
    """Return the encoding that holds these codes exactly; None if there is none."""
    if group_size % GROUP and group_size < in_features:
        return None
    return "uint4" if bits <= 4 else "uint8"


def read_codes(
    encoding: str | None,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    group_size: int,
    groups: Tensor | None = None,
) -> tuple[str | None, Mapping[str, Tensor]]:
    """Return the encoding and the tensors of a layer of codes.

    Args:
        encoding: `encoding_of` the layer; None for floats.
        codes: uint8 ``[out, in]``.
        scales: floats ``[out, G]``.
        zeros: integers ``[out, G]``.
        group_size: inputs of a group.
        groups: the group of each input ``[in]``, if inputs are not grouped in order. Only for floats.
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
