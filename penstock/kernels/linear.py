"""Packed linear layers: a weight has exactly one form in memory, made once, at load.

An *encoding* says how a float weight is stored, what it stands for, and how it is multiplied.
`LinearEncoding.multiply` is the definition of correct: a back end may multiply faster, never differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.dtype import DType
from penstock.errors import ConfigError
from penstock.kernels.panels import PANEL, from_panels
from penstock.kernels.quantized import GroupedEncoding, Int8Encoding

Layout = Literal["rows", "panels"]
"""How a packed weight lies in memory: as its encoding defines it, or as `kernels.panels` does."""

ROW_TILE = 16
"""Every torch product has a multiple of this many rows: BLAS uses other kernels for few rows than for many.
MKL on Intel processors needs 16; 8 rows give other bits there."""

INPUT_BLOCK = 256
"""Inputs that one float32 product sums. MKL splits longer sums over its threads on Intel processors, so that
their bits depend on the number of threads."""


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
        """What it is called: by ``--quantization-encoding``, where a whole model can be asked for in it."""
        ...

    @property
    def compute_dtype(self) -> DType:
        """The type of the activations that go with it."""
        ...

    @property
    def needs_calibration(self) -> bool:
        """Whether packing has a choice between errors of the weights, see `pack`."""
        ...

    def num_bytes(self, out_features: int, in_features: int) -> int:
        """Bytes that a packed weight of this shape takes in panels, which is no less than in rows."""
        ...

    def pack(self, weight: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
        """The stored form of ``weight [out, in]``.

        Encodings with `needs_calibration` minimise the squared weight errors, weighted by ``importance [in]``
        of their inputs. Its values are above 0. Without it all inputs have the same weight.
        """
        ...

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The weight ``[out, in]`` that the stored form stands for."""
        ...

    def multiply(self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        """``x [T, in]`` times the weight, plus ``bias [out]``: ``[T, out]`` of the type of x.

        A row's bits depend on no other row.
        """
        ...


@dataclass(frozen=True, slots=True)
class FloatEncoding:
    """Weights as plain floating-point numbers."""

    dtype: DType
    needs_calibration: bool = False

    @property
    def name(self) -> str:
        return self.dtype.value

    @property
    def compute_dtype(self) -> DType:
        return self.dtype

    def num_bytes(self, out_features: int, in_features: int) -> int:
        pairs = 2 if self.dtype is DType.bfloat16 else 1
        filled = -(-out_features // PANEL) * PANEL * -(-in_features // pairs) * pairs
        return filled * self.dtype.size_in_bytes

    def pack(self, weight: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
        """There is no choice: each weight is rounded by itself."""
        return {"weight": weight.to(self.dtype.to_torch()).contiguous()}

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight"]

    def multiply(self, x: Tensor, tensors: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
        return multiply_floats(x, tensors["weight"].to(x.dtype), bias)


def multiply_floats(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x [T, in]`` times ``weight [out, in]`` of the same type, plus ``bias [out]``, row by row."""
    num_rows, in_features = x.shape
    padding = -num_rows % ROW_TILE
    padded = F.pad(x, (0, 0, 0, padding)) if padding else x
    block = INPUT_BLOCK if x.dtype == torch.float32 else in_features
    y = F.linear(padded[:, :block], weight[:, :block])
    for start in range(block, in_features, block):
        stop = start + block
        y += F.linear(padded[:, start:stop], weight[:, start:stop])
    y = y[:num_rows]
    return y if bias is None else y + bias.to(x.dtype)


_KINDS: tuple[LinearEncoding, ...] = (
    FloatEncoding(DType.float32),
    FloatEncoding(DType.bfloat16),
    FloatEncoding(DType.float16),
    Int8Encoding(),
    GroupedEncoding(5),
    GroupedEncoding(4),
)

ENCODINGS: dict[str, LinearEncoding] = {kind.name: kind for kind in _KINDS}
"""All encodings by name."""

INTERNAL_ENCODINGS = frozenset({"int5"})
"""Encodings of single layers in a model of another encoding, which no model has as a whole."""


def encoding_named(name: str) -> LinearEncoding:
    """The encoding called ``name``.

    Raises:
        ConfigError: there is none; the message lists those that a user can choose.
    """
    try:
        return ENCODINGS[name]
    except KeyError:
        known = ", ".join(name for name in ENCODINGS if name not in INTERNAL_ENCODINGS)
        raise ConfigError("quantization_encoding", f"unknown encoding {name!r}: use one of {known}") from None


def pack_linear(
    weight: Tensor | Sequence[Tensor],  # [out, in], or its parts one behind the other
    encoding: str,
    *,
    bias: Tensor | None = None,  # [out]
    slices: Sequence[LinearSlice] = (),
) -> PackedLinear:
    """Packs a weight in the encoding named, in the layout that the encoding defines.

    Raises:
        ConfigError: the encoding is unknown.
    """
    with torch.no_grad():
        weight = weight if isinstance(weight, Tensor) else _stacked(tuple(weight))
        rows = encoding_named(encoding).pack(weight)
    return layer_of(rows, shape_of([weight]), encoding, bias, slices)


def _stacked(parts: tuple[Tensor, ...]) -> Tensor:
    """The parts one below the other."""
    first = parts[0]
    if first.is_meta:  # torch.cat of such tensors imports torch._dynamo, and with it triton where installed
        rows = sum(part.shape[0] for part in parts)
        return torch.empty((rows, *first.shape[1:]), dtype=first.dtype, device="meta")
    return torch.cat(parts)


def pack_quantized(
    rows: Mapping[str, Tensor],
    encoding: str,
    *,
    bias: Tensor | None = None,  # [out]
    slices: Sequence[LinearSlice] = (),
) -> PackedLinear:
    """A weight that is in the form of its encoding, ``weight [out, in]`` and what goes with it, as it is.

    Raises:
        ConfigError: the encoding is unknown.
    """
    return layer_of(rows, shape_of([rows["weight"]]), encoding, bias, slices)


def layer_of(
    tensors: Mapping[str, Tensor],
    shape: tuple[int, int],  # [out, in]
    encoding: str,
    bias: Tensor | None,  # [out]
    slices: Sequence[LinearSlice],
    layout: Layout = "rows",
) -> PackedLinear:
    """The layer of a packed weight; its bias in the type of the activations that go with the encoding."""
    if bias is not None:
        bias = bias.detach().to(encoding_named(encoding).compute_dtype.to_torch()).contiguous()
    return PackedLinear(encoding, tensors, shape[1], shape[0], bias, tuple(slices), layout)


def shape_of(parts: Sequence[Tensor]) -> tuple[int, int]:
    """``(out, in)`` of parts of a weight, one behind the other."""
    return sum(map(len, parts)), parts[0].shape[1]


def tensors_in_rows(packed: PackedLinear) -> Mapping[str, Tensor]:
    """The tensors of a packed linear as its encoding defines them, whatever its layout."""
    if packed.layout == "rows":
        return packed.tensors
    return from_panels(packed.encoding, packed.tensors, packed.out_features, packed.in_features)


def unpack_linear(packed: PackedLinear) -> Tensor:
    """The weight ``[out, in]`` that a packed linear stands for, whatever its layout."""
    return encoding_named(packed.encoding).unpack(tensors_in_rows(packed))
