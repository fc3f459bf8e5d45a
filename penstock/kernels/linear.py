"""Packed linear layers: weights in the form that a back end multiplies.

An encoding (`penstock.kernels.encodings`) defines the numbers of a weight. A `Layout` defines their order in
memory. `ROWS` is the order that the encoding defines; a back end can define other layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.encodings import encoding_named

ROW_TILE = 16
"""The number of rows of a torch product is padded to a multiple of this number. Without padding, the bits of
a row would depend on the number of rows, because BLAS uses different kernels for few and for many rows. MKL
on Intel processors needs 16: with 8 rows the bits differ.
"""

INPUT_BLOCK = 256
"""Maximum number of inputs that one float32 product sums. On Intel processors, MKL divides longer sums among
its threads, so the bits of longer sums would depend on the number of threads.
"""


@dataclass(frozen=True, slots=True)
class Layout:
    """The memory layout of packed weights."""

    name: str
    to_rows: Callable[[PackedLinear], Mapping[str, Tensor]]
    """Converts the tensors of a weight in this layout to the tensors that `LinearEncoding.pack` returns."""


def _get_tensors(packed: PackedLinear) -> Mapping[str, Tensor]:
    return packed.tensors


ROWS = Layout("rows", _get_tensors)
"""The tensors that `LinearEncoding.pack` returns."""


@dataclass(frozen=True, slots=True)
class LinearSlice:
    """The outputs ``start:stop`` of a fused linear layer, which form the layer ``name`` of the checkpoint."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer, packed by an `Ops` for its own `linear`."""

    encoding: str
    tensors: Mapping[str, Tensor]
    in_features: int
    out_features: int
    bias: Tensor | None = None  # [out]
    slices: tuple[LinearSlice, ...] = ()
    layout: Layout = ROWS
    order: Tensor | None = None  # [in] int32
    """Permutation of the inputs: column c of the weight is input ``order[c]``. None: the original order."""


def multiply_floats(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x [T, in]`` times ``weight [out, in]`` of the same type, plus ``bias [out]``.

    The bits of a row do not depend on other rows.
    """
    num_rows, in_features = x.shape
    padding = -num_rows % ROW_TILE
    padded = F.pad(x, (0, 0, 0, padding)) if padding else x
    inputs_per_product = INPUT_BLOCK if x.dtype == torch.float32 else in_features
    y = F.linear(padded[:, :inputs_per_product], weight[:, :inputs_per_product])
    for start in range(inputs_per_product, in_features, inputs_per_product):
        stop = start + inputs_per_product
        y += F.linear(padded[:, start:stop], weight[:, start:stop])
    y = y[:num_rows]
    return y if bias is None else y + bias.to(x.dtype)


def pack_linear(
    weight: Tensor | Sequence[Tensor],  # [out, in], or its parts in order
    encoding: str,
    *,
    bias: Tensor | None = None,  # [out]
    slices: Sequence[LinearSlice] = (),
) -> PackedLinear:
    """Pack a weight of floats in an encoding, in the layout `ROWS`.

    Raises:
        ConfigError: the encoding is unknown.
    """
    with torch.no_grad():
        weight = weight if isinstance(weight, Tensor) else _concatenate(tuple(weight))
        rows = encoding_named(encoding).pack(weight)
    return make_packed_linear(rows, weight_shape([weight]), encoding, bias, slices)


def _concatenate(parts: tuple[Tensor, ...]) -> Tensor:
    """Return the parts as one tensor, in order."""
    first_part = parts[0]
    if first_part.is_meta:  # torch.cat of meta tensors imports torch._dynamo, and with it triton if installed
        num_rows = sum(part.shape[0] for part in parts)
        return torch.empty((num_rows, *first_part.shape[1:]), dtype=first_part.dtype, device="meta")
    return torch.cat(parts)


def pack_quantized(
    rows: Mapping[str, Tensor],
    encoding: str,
    *,
    bias: Tensor | None = None,  # [out]
    slices: Sequence[LinearSlice] = (),
    order: Tensor | None = None,  # [in] int32
) -> PackedLinear:
    """Return the layer of a weight that is already quantized, in the layout `ROWS`.

    ``rows`` are the tensors of the weight, as `LinearEncoding.pack` returns them.

    Raises:
        ConfigError: there is a bias, and the encoding is unknown.
    """
    return make_packed_linear(rows, weight_shape([rows["weight"]]), encoding, bias, slices, order=order)


def make_packed_linear(
    tensors: Mapping[str, Tensor],
    shape: tuple[int, int],  # [out, in]
    encoding: str,
    bias: Tensor | None,  # [out]
    slices: Sequence[LinearSlice],
    layout: Layout = ROWS,
    order: Tensor | None = None,  # [in] int32
) -> PackedLinear:
    """Return the layer of a packed weight. The bias is converted to the encoding's type of activations.

    Raises:
        ConfigError: there is a bias, and the encoding is unknown.
    """
    if bias is not None:
        bias = bias.detach().to(encoding_named(encoding).compute_dtype.to_torch()).contiguous()
    return PackedLinear(encoding, tensors, shape[1], shape[0], bias, tuple(slices), layout, order)


def weight_shape(parts: Sequence[Tensor]) -> tuple[int, int]:
    """Return ``(out, in)`` of a weight given in parts along its outputs."""
    return sum(map(len, parts)), parts[0].shape[1]


def tensors_in_rows(packed: PackedLinear) -> Mapping[str, Tensor]:
    """Return the tensors of a layer in any layout, converted to those that `LinearEncoding.pack` returns.

    The inputs are in the order of `PackedLinear.order`.
    """
    return packed.layout.to_rows(packed)


def unpack_linear(packed: PackedLinear) -> Tensor:
    """Return the weight ``[out, in]`` of a layer in any layout, with the inputs in their original order."""
    weight = encoding_named(packed.encoding).unpack(tensors_in_rows(packed))
    return weight if packed.order is None else weight[:, packed.order.argsort()]
