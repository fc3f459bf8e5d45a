"""The weights of a product, the rows that each weight multiplies, and the tiles of the product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.cuda.launch import divide_up, num_processors, tensor_addresses
from penstock.kernels.encodings import LinearEncoding, encoding_named
from penstock.kernels.lazy_weight import LazyWeight
from penstock.kernels.linear import ROWS, PackedLinear
from penstock.kernels.nibbles import NIBBLES

_MAX_INPUTS = 1 << 15
"""Maximum number of inputs of a row that one program quantizes."""
_FIXED_TILE_ROWS = 64
"""Rows of a tile if results must not depend on the number of rows."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows sorted by group: by the weight, such as an expert or an adapter, that multiplies them."""

    rows: Tensor  # [P] int64: entry p of the sorted order is row rows[p]
    starts: Tensor  # [n + 1] int64: group g has the entries starts[g]:starts[g + 1] of the sorted order
    num_groups: int  # n

    @classmethod
    def of(cls, group_of_row: Tensor, num_groups: int) -> Groups:
        """Sort rows by ``group_of_row [P]`` int64. Rows with -1 have no group and come first."""
        sorted_groups, rows = torch.sort(group_of_row, stable=True)
        group_ids = torch.arange(num_groups + 1, dtype=sorted_groups.dtype, device=sorted_groups.device)
        return cls(rows, torch.searchsorted(sorted_groups, group_ids), num_groups)


@dataclass(frozen=True, slots=True)
class WeightTables:
    """One weight, or several of the same shape and encoding, in the form that the programs read."""

    encoding: LinearEncoding
    first_linear: PackedLinear
    tables: dict[str, Tensor]
    """By tensor name, the addresses ``[n]`` of the tensor in all weights; empty for one weight."""

    @classmethod
    def of(cls, linears: Sequence[PackedLinear]) -> WeightTables | None:
        """Return the weights of layers, or None if no program supports the product.

        None is returned if the layers differ in shape, encoding or layout, if only some have a bias, if a
        weight is not packed yet, if one of several layers permutes its inputs, or if no program supports the
        encoding, layout or size of the first layer.
        """
        first, encoding = linears[0], encoding_named(linears[0].encoding)
        if any(isinstance(linear.tensors, LazyWeight) and linear.tensors.parts for linear in linears):
            return None
        if len(linears) > 1 and any(linear.order is not None for linear in linears):
            return None
        names = [*first.tensors, *([] if first.bias is None else ["bias"])]
        if not _is_supported(encoding, first) or any(
            (linear.encoding, linear.layout, linear.in_features, linear.out_features)
            != (first.encoding, first.layout, first.in_features, first.out_features)
            or (linear.bias is None) != (first.bias is None)
            for linear in linears
        ):
            return None
        if len(linears) == 1:
            return cls(encoding, first, {})
        tables = {name: tensor_addresses([_get_tensor(linear, name) for linear in linears]) for name in names}
        return cls(encoding, first, tables)

    def arguments(self, *names: str) -> list[Tensor]:
        """Return each named tensor of the first weight, followed by the address table of the tensor.

        Placeholders replace missing tensors and tables.
        """
        arguments: list[Tensor] = []
        first = self.first_linear
        placeholder = first.tensors["weight"]
        for name in names:
            exists = name in first.tensors or (name == "bias" and first.bias is not None)
            tensor = _get_tensor(first, name) if exists else placeholder
            arguments += [tensor, self.tables.get(name, tensor)]
        return arguments


def _is_supported(encoding: LinearEncoding, packed: PackedLinear) -> bool:
    """Return whether a program can multiply by the weight of this layer."""
    tensors = packed.tensors
    if packed.layout not in (ROWS, NIBBLES) or not all(tensor.is_contiguous() for tensor in tensors.values()):
        return False
    if encoding.is_float or encoding.block_kind is not None or encoding.number_format == "e4m3":
        return True
    if encoding.number_format != "integer":
        return False
    if encoding.group_size is not None:
        return True
    return not encoding.has_zero_points and packed.in_features <= _MAX_INPUTS


def _get_tensor(packed: PackedLinear, name: str) -> Tensor:
    if name == "bias":
        assert packed.bias is not None
        return packed.bias
    return packed.tensors[name]


def tile_rows(num_rows: int, groups: Groups | None, *, is_deterministic: bool = False) -> int:
    """Return the number of rows of a tile of a product of ``num_rows`` rows.

    With ``is_deterministic`` the number is fixed, so that results do not depend on the number of rows.
    Otherwise it depends on the mean number of rows per group.
    """
    if is_deterministic:
        return _FIXED_TILE_ROWS
    rows_per_group = num_rows if groups is None else num_rows // groups.num_groups
    return 16 if rows_per_group <= 16 else 32 if rows_per_group <= 32 else 64


def tile_outputs(num_rows: int, packed: PackedLinear, groups: Groups | None, device: torch.device) -> int:
    """Return the number of outputs of a tile: 16 or 64.

    The number is 16 for up to 64 rows without groups if tiles of 64 outputs would leave multiprocessors idle.
    """
    fills_device = groups is not None or divide_up(packed.out_features, 64) >= num_processors(device)
    return 64 if fills_device or num_rows > 64 else 16


def product_grid(
    num_rows: int, rows_per_tile: int, outputs_per_tile: int, packed: PackedLinear, groups: Groups | None
) -> tuple[int, int]:
    """Return the grid of a product: the number of tiles of rows (with groups, at most), and of outputs."""
    row_tiles = divide_up(num_rows, rows_per_tile)
    if groups is not None:
        row_tiles = num_rows // rows_per_tile + groups.num_groups
    return row_tiles if num_rows else 0, divide_up(packed.out_features, outputs_per_tile)


def sorted_rows(x: Tensor, groups: Groups | None) -> tuple[Tensor, Tensor]:
    """Return the program arguments ``rows`` and ``starts`` (`Groups`); placeholders without groups."""
    return (x, x) if groups is None else (groups.rows, groups.starts)
