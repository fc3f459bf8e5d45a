"""Packed linear layers: a weight has exactly one form in memory, made once, at load.

An *encoding* says how a float weight is stored and what it stands for. `LinearEncoding.unpack` is the
definition of correct: a back end may multiply faster, never differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from penstock.dtype import DType
from penstock.errors import ConfigError
from penstock.kernels.panels import from_panels

Layout = Literal["rows", "panels"]
"""How a packed weight lies in memory: as its encoding defines it, or as `kernels.panels` does."""


@dataclass(frozen=True, slots=True)
class LinearSlice:
    """Output rows ``start:stop`` of a fused linear, under the name they have in the checkpoint."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer ready to be multiplied by the `Ops` that packed it."""

    encoding: str
    tensors: Mapping[str, Tensor]
    in_features: int
    out_features: int
    bias: Tensor | None = None  # [out]
    slices: tuple[LinearSlice, ...] = ()
    layout: Layout = "rows"


class LinearEncoding(Protocol):
    """How the weights of linear layers are stored."""

    @property
    def name(self) -> str:
        """What ``--quantization-encoding`` calls it."""
        ...

    @property
    def compute_dtype(self) -> DType:
        """The type of the activations that go with it."""
        ...

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Bytes that a packed weight of this shape takes."""
        ...

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """The stored form of ``weight [out, in]``."""
        ...

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The weight ``[out, in]`` that the stored form stands for."""
        ...


@dataclass(frozen=True, slots=True)
class FloatEncoding:
    """Weights as plain floating-point numbers."""

    dtype: DType

    @property
    def name(self) -> str:
        return self.dtype.value

    @property
    def compute_dtype(self) -> DType:
        return self.dtype

    def num_bytes(self, out_features: int, in_features: int) -> int:
        return out_features * in_features * self.dtype.size_in_bytes

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        return {"weight": weight.to(self.dtype.to_torch()).contiguous()}

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight"]


ENCODINGS: dict[str, LinearEncoding] = {
    dtype.value: FloatEncoding(dtype) for dtype in (DType.float32, DType.bfloat16, DType.float16)
}
"""All encodings by name."""


def encoding_named(name: str) -> LinearEncoding:
    """The encoding called ``name``.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    try:
        return ENCODINGS[name]
    except KeyError:
        known = ", ".join(ENCODINGS)
        raise ConfigError("quantization_encoding", f"unknown encoding {name!r}: use one of {known}") from None


def pack_linear(
    weight: Tensor,  # [out, in]
    encoding: str,
    *,
    bias: Tensor | None = None,  # [out]
    slices: Sequence[LinearSlice] = (),
) -> PackedLinear:
    """Packs a weight in the encoding named, in the layout that the encoding defines.

    Raises:
        ConfigError: the encoding is unknown.
    """
    kind = encoding_named(encoding)
    out_features, in_features = weight.shape
    with torch.no_grad():
        tensors = kind.pack(weight)
        if bias is not None:
            bias = bias.to(kind.compute_dtype.to_torch())
    return PackedLinear(encoding, tensors, in_features, out_features, bias, tuple(slices))


def unpack_linear(packed: PackedLinear) -> Tensor:
    """The weight ``[out, in]`` that a packed linear stands for, whatever its layout."""
    tensors = packed.tensors
    if packed.layout == "panels":
        tensors = from_panels(packed.encoding, tensors, packed.out_features, packed.in_features)
    return encoding_named(packed.encoding).unpack(tensors)
