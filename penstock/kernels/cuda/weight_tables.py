"""The weights of a product, and the rows that each of them multiplies."""

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
"""Maximum length of a row that one program quantizes."""
_FIXED_ROWS = 64
"""Rows of a tile if results must not depend on the number of rows."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The rows sorted by group: row p of the sorted rows is ``rows[p]``."""

    rows: Tensor  # [P] int64
    starts: Tensor  # [n + 1] int64: group g has the sorted rows starts[g]:starts[g + 1]
    count: int  # n

    @classmethod
    def of(cls, group_of_row: Tensor, count: int) -> Groups:
        """Return the groups of ``group_of_row [P]`` int64; rows of -1 have no group and come first."""
        ordered, rows = torch.sort(group_of_row, stable=True)
        numbers = torch.arange(count + 1, dtype=ordered.dtype, device=ordered.device)
        return cls(rows, torch.searchsorted(ordered, numbers), count)


@dataclass(frozen=True, slots=True)
class WeightTables:
    """One weight, or several of the same shape and encoding, in the form that the programs read."""

    kind: LinearEncoding
    first: PackedLinear
    tables: dict[str, Tensor]
    """Name of a tensor -> the addresses ``[n]`` of the tensors of all weights; empty for one weight."""

    @classmethod
    def of(cls, linears: Sequence[PackedLinear]) -> WeightTables | None:
        """Return the weights of layers; None if they differ, or if no program supports their encoding."""
        first, kind = linears[0], encoding_named(linears[0].encoding)
        if any(isinstance(one.tensors, LazyWeight) and one.tensors.parts for one in linears):
            return None
        if len(linears) > 1 and any(one.order is not None for one in linears):
            return None
        names = [*first.tensors, *([] if first.bias is None else ["bias"])]
        if not _is_supported(kind, first) or any(
            (one.encoding, one.layout, one.in_features, one.out_features)
            != (first.encoding, first.layout, first.in_features, first.out_features)
            or (one.bias is None) != (first.bias is None)
            for one in linears
        ):
            return None
        if len(linears) == 1:
            return cls(kind, first, {})
        tables = {name: tensor_addresses([_tensor(one, name) for one in linears]) for name in names}
        return cls(kind, first, tables)

    def arguments(self, *names: str) -> list[Tensor]:
        """Return each tensor followed by its address table, with placeholders for missing ones."""
        found: list[Tensor] = []
        for name in names:
            weight = self.first.tensors["weight"]
            has_one = name in self.first.tensors or (name == "bias" and self.first.bias is not None)
            one = _tensor(self.first, name) if has_one else weight
            found += [one, self.tables.get(name, one)]
        return found


def _is_supported(kind: LinearEncoding, packed: PackedLinear) -> bool:
    """Return whether a program supports weights with these properties."""
    tensors = packed.tensors
    if packed.layout not in (ROWS, NIBBLES) or not all(one.is_contiguous() for one in tensors.values()):
        return False
    if kind.is_float or kind.block_kind is not None or kind.numbers == "e4m3":
        return True
    if kind.numbers != "integer":
        return False
    return kind.group_size is not None or (not kind.has_zero_points and packed.in_features <= _MAX_INPUTS)


def _tensor(packed: PackedLinear, name: str) -> Tensor:
    if name == "bias":
        assert packed.bias is not None
        return packed.bias
    return packed.tensors[name]


def tile_rows(count: int, groups: Groups | None, *, is_deterministic: bool = False) -> int:
    """Return the rows of a tile: few if a group has few, and a fixed number if it must be deterministic."""
    if is_deterministic:
        return _FIXED_ROWS
    each = count if groups is None else count // groups.count
    return 16 if each <= 16 else 32 if each <= 32 else 64


def output_tile(count: int, packed: PackedLinear, groups: Groups | None, device: torch.device) -> int:
    """Return the outputs of a tile: few if tiles of 64 would leave multiprocessors idle."""
    is_large = groups is not None or divide_up(packed.out_features, 64) >= num_processors(device)
    return 64 if is_large or count > 64 else 16


def product_grid(
    count: int, rows: int, columns: int, packed: PackedLinear, groups: Groups | None
) -> tuple[int, int]:
    tiles = divide_up(count, rows) if groups is None else count // rows + groups.count
    return tiles if count else 0, divide_up(packed.out_features, columns)


def sorted_rows(x: Tensor, groups: Groups | None) -> tuple[Tensor, Tensor]:
    return (x, x) if groups is None else (groups.rows, groups.starts)
