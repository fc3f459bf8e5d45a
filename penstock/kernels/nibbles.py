"""The layout of weights of up to 4 bits on GPUs: a byte holds two weights (nibbles).

``weight`` is uint8 ``[out, ceil(in / 64) * 32]``. Byte ``32 * p + j`` of a row, with j below 32, holds the
input ``64 * p + j`` in its low half and the input ``64 * p + 32 + j`` in its high half. 32 bytes therefore
hold two groups of 32 inputs. Half of the range is added to signed integers before they are stored. Padding is
stored like the integer 0. The other tensors of `LinearEncoding.pack` are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.dtype import DType
from penstock.kernels.encodings import LinearEncoding, encoding_named
from penstock.kernels.linear import Layout, PackedLinear

_PAIR_INPUTS = 64
"""Number of inputs of a pair of groups."""


def fits_nibbles(encoding: LinearEncoding) -> bool:
    """Return whether the weights of an encoding can be stored in nibbles."""
    has_codes = encoding.number_format == "integer" or encoding.block_kind is not None
    return has_codes and encoding.bits <= 4


def signed_offset(encoding: LinearEncoding) -> int:
    """Return the offset that `to_nibbles` adds to integers: half of the range of signed integers, else 0."""
    return 1 << encoding.bits - 1 if encoding.storage_dtype is DType.int8 else 0


def to_nibbles(rows: Mapping[str, Tensor], encoding: LinearEncoding) -> dict[str, Tensor]:
    """Return the tensors of a weight in nibbles; ``rows`` are the tensors of `LinearEncoding.pack`."""
    weight, offset = rows["weight"], signed_offset(encoding)
    stored_codes = (weight.short() + offset).to(torch.uint8)
    padded = F.pad(stored_codes, (0, -stored_codes.shape[1] % _PAIR_INPUTS), value=offset)
    pairs = padded.view(len(stored_codes), padded.shape[1] // _PAIR_INPUTS, 2, _PAIR_INPUTS // 2)
    return {**rows, "weight": (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1).contiguous()}


def from_nibbles(
    tensors: Mapping[str, Tensor], encoding: LinearEncoding, in_features: int
) -> dict[str, Tensor]:
    """Return the tensors ``rows`` from which `to_nibbles` computed ``tensors``."""
    row_bytes = tensors["weight"]
    pairs = row_bytes.view(len(row_bytes), -1, _PAIR_INPUTS // 2)
    stored_codes = torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1)[:, :in_features]
    weight = (stored_codes.short() - signed_offset(encoding)).to(encoding.storage_dtype.to_torch())
    return {**tensors, "weight": weight.contiguous()}


def _to_rows(packed: PackedLinear) -> dict[str, Tensor]:
    return from_nibbles(packed.tensors, encoding_named(packed.encoding), packed.in_features)


NIBBLES = Layout("nibbles", _to_rows)
"""The layout of codes of up to 4 bits on GPUs."""
