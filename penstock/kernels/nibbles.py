"""The layout of weights of up to 4 bits on GPUs: a byte holds two weights (nibbles).

``weight`` is uint8 ``[out, ceil(in / 64) * 32]``. Byte ``32 * p + j`` of a row holds the input ``64 * p + j``
in its low half and ``64 * p + 32 + j`` in its high half. So 32 bytes hold two groups of 32 inputs. Signed
integers are stored with an offset of half of their range. Padding is stored as this offset. All other tensors
are unchanged results of `LinearEncoding.pack`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.dtype import DType
from penstock.kernels.encodings import LinearEncoding, encoding_named
from penstock.kernels.linear import Layout, PackedLinear

_PAIR = 64
"""Number of inputs in two groups."""


def fits_nibbles(encoding: LinearEncoding) -> bool:
    """Return whether the weights of an encoding can be stored in nibbles."""
    has_codes = encoding.numbers == "integer" or encoding.block_kind is not None
    return has_codes and encoding.bits <= 4


def signed_offset(encoding: LinearEncoding) -> int:
    """Return the offset that is added to a stored integer: half of the range of signed integers, else 0."""
    return 1 << encoding.bits - 1 if encoding.storage_dtype is DType.int8 else 0


def to_nibbles(rows: Mapping[str, Tensor], encoding: LinearEncoding) -> dict[str, Tensor]:
    """Return the tensors of a weight in nibbles, from those that `LinearEncoding.pack` returns."""
    weight, offset = rows["weight"], signed_offset(encoding)
    stored = (weight.short() + offset).to(torch.uint8)
    padded = F.pad(stored, (0, -stored.shape[1] % _PAIR), value=offset)
    pairs = padded.view(len(stored), padded.shape[1] // _PAIR, 2, _PAIR // 2)
    return {**rows, "weight": (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1).contiguous()}


def from_nibbles(
    tensors: Mapping[str, Tensor], encoding: LinearEncoding, in_features: int
) -> dict[str, Tensor]:
    """Invert `to_nibbles` exactly."""
    bytes_of_rows = tensors["weight"]
    pairs = bytes_of_rows.view(len(bytes_of_rows), -1, _PAIR // 2)
    stored = torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1)[:, :in_features]
    weight = (stored.short() - signed_offset(encoding)).to(encoding.storage_dtype.to_torch())
    return {**tensors, "weight": weight.contiguous()}


def _to_rows(packed: PackedLinear) -> dict[str, Tensor]:
    return from_nibbles(packed.tensors, encoding_named(packed.encoding), packed.in_features)


NIBBLES = Layout("nibbles", _to_rows)
"""The layout of codes of up to 4 bits on GPUs."""
