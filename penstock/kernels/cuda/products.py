"""Products of rows with one packed weight, or of groups of rows with one weight each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.cuda.launch import divide_up, launch, pointers_of, power_of_two, row_stride
from penstock.kernels.cuda.programs import products as programs
from penstock.kernels.cuda.programs import quantization
from penstock.kernels.encodings import LinearEncoding, encoding_named
from penstock.kernels.encodings._sizes import GROUP
from penstock.kernels.lazy_weight import LazyWeight
from penstock.kernels.linear import ROWS, PackedLinear
from penstock.kernels.nibbles import NIBBLES, signed_offset
from penstock.kernels.quantized import INPUTS_PER_EXTRA, MAX_EXTRAS

_INPUTS = 64
"""Number of inputs per tile. It is fixed because the order of additions depends on it."""
_FIXED_ROWS = 64
_ROW_WEIGHTS, _ROW_INPUTS = 8192, 4096
"""Number of weights, and of inputs, that a program of `multiply_row` reads at once."""
_MAX_INPUTS = 1 << 15
"""Maximum length of a row that one program quantises."""
_BYTE_SHIFT = 128


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
        if not _is_known(kind, first) or any(
            (one.encoding, one.layout, one.in_features, one.out_features)
            != (first.encoding, first.layout, first.in_features, first.out_features)
            or (one.bias is None) != (first.bias is None)
            for one in linears
        ):
            return None
        if len(linears) == 1:
            return cls(kind, first, {})
        tables = {name: pointers_of([_tensor(one, name) for one in linears]) for name in names}
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


def multiply_floats(
    x: Tensor, weights: WeightTables, groups: Groups | None, *, is_deterministic: bool
) -> Tensor:
    """Return the product of rows with weights of floats or 8-bit floats.

    Args:
        x: ``[T, in]``; row ``groups.rows[p]`` of it is multiplied if ``groups`` is given.
        weights: one weight without ``groups``, one per group otherwise.
        groups: the sorted rows.
        is_deterministic: whether the sizes of tiles must be independent of the number of rows.

    Returns:
        ``[T, out]``, or ``[P, out]`` in the sorted order.
    """
    packed, is_e4m3 = weights.first, weights.kind.numbers == "e4m3"
    count = len(x) if groups is None else len(groups.rows)
    out = torch.empty((count, packed.out_features), dtype=x.dtype, device=x.device)
    weight = packed.tensors["weight"]
    is_wide = x.dtype == torch.float32 or (weight.is_floating_point() and weight.dtype != x.dtype)
    rows = _FIXED_ROWS if is_deterministic else _tile_rows(count, groups)
    inputs = weights.kind.group_size if is_e4m3 else _INPUTS
    scales = packed.tensors.get("scales", weight)
    launch(
        programs.multiply_floats, _grid(count, rows, 64, packed, groups), out, x,
        *weights.arguments("weight", "scales", "bias"), *_sorted(x, groups), x, count,
        1 if groups is None else groups.count, packed.out_features, packed.in_features, row_stride(x),
        row_stride(out), *weight.stride(), 0, scales.stride(0), M=rows, N=64, INPUTS=inputs,
        GROUPS=groups is not None, POINTERS=groups is not None, GATHERS=groups is not None, SCATTERS=False,
        ADDS=False, LIMITS="", HAS_BIAS=packed.bias is not None, IS_E4M3=is_e4m3, WIDE=is_wide,
    )  # fmt: skip
    return out


def multiply_row(x: Tensor, packed: PackedLinear) -> Tensor:
    """Return the product ``[1, out]`` of a single row ``[1, in]`` with a weight of floats.

    The product reads each weight once and is bound by the memory bandwidth.
    """
    weight, bias = packed.tensors["weight"], packed.bias
    outputs, inputs = packed.out_features, packed.in_features
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    columns = min(power_of_two(inputs, 16), _ROW_INPUTS)
    tile = max(_ROW_WEIGHTS // columns, 1)
    launch(
        programs.multiply_row, (divide_up(outputs, tile),), out, x, weight, weight if bias is None else bias,
        outputs, inputs, N=tile, INPUTS=columns, HAS_BIAS=bias is not None, is_dependent=True,
    )  # fmt: skip
    return out


def multiply_encoded(x: Tensor, weights: WeightTables, groups: Groups | None) -> Tensor:
    """Return the product of rows with weights in an integer encoding; arguments as in `multiply_floats`."""
    if weights.kind.activation_dtype is None:
        return multiply_floats(x, weights, groups, is_deterministic=True)
    if weights.kind.group_size is None:
        return _multiply_rows(x, weights, groups)
    return _multiply_groups(x, weights, groups)


def _multiply_rows(x: Tensor, weights: WeightTables, groups: Groups | None) -> Tensor:
    """Multiply integers with one scale per row and per output."""
    packed, (num_rows, in_features) = weights.first, x.shape
    integers = torch.empty((2, num_rows, in_features), dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    wide = torch.empty(num_rows, dtype=torch.int32, device=x.device)
    extras = min(MAX_EXTRAS, in_features // INPUTS_PER_EXTRA)
    launch(
        quantization.quantize_rows, (num_rows,), integers, scales, wide, x, num_rows, in_features,
        row_stride(x), extras, WIDTH=power_of_two(in_features), num_warps=8,
    )  # fmt: skip
    count = num_rows if groups is None else len(groups.rows)
    out = torch.empty((count, packed.out_features), dtype=x.dtype, device=x.device)
    rows = _tile_rows(count, groups)
    launch(
        programs.multiply_rows, _grid(count, rows, 64, packed, groups), out, integers, scales, wide,
        *weights.arguments("weight", "scales", "bias"), *_sorted(x, groups), count,
        1 if groups is None else groups.count, num_rows, packed.out_features, in_features, M=rows, N=64,
        INPUTS=_INPUTS, GROUPS=groups is not None, GATHERS=groups is not None,
        HAS_BIAS=packed.bias is not None,
    )  # fmt: skip
    return out


def _multiply_groups(x: Tensor, weights: WeightTables, groups: Groups | None) -> Tensor:
    """Multiply integers with a scale per `GROUP` inputs."""
    packed, kind, (num_rows, in_features) = weights.first, weights.kind, x.shape
    num_groups, weight = divide_up(in_features, GROUP), packed.tensors["weight"]
    integers = torch.empty((num_rows, num_groups * GROUP), dtype=torch.int8, device=x.device)
    scales = torch.empty((num_rows, num_groups), dtype=torch.float32, device=x.device)
    tile = min(power_of_two(num_groups), 32)
    launch(
        quantization.quantize_groups, (num_rows, divide_up(num_groups, tile)), integers, scales, x,
        in_features, num_groups, row_stride(x), GROUPS=tile,
    )  # fmt: skip
    count = num_rows if groups is None else len(groups.rows)
    out = torch.empty((count, packed.out_features), dtype=x.dtype, device=x.device)
    rows, is_nibbles = _tile_rows(count, groups), packed.layout == NIBBLES
    shift = signed_offset(kind) if is_nibbles else (_BYTE_SHIFT if kind.has_zero_points else 0)
    launch(
        programs.multiply_groups, _grid(count, rows, 64, packed, groups), out, integers, scales,
        *weights.arguments("weight", "scales", "zeros", "row_scales", "bias"), *_sorted(x, groups), count,
        1 if groups is None else groups.count, packed.out_features, num_groups, weight.shape[1],
        M=rows, N=64, IS_NIBBLES=is_nibbles, SHIFT=shift, GROUPS=groups is not None,
        GATHERS=groups is not None, HAS_ZEROS="zeros" in packed.tensors,
        HAS_ROW_SCALES="row_scales" in packed.tensors, HAS_BIAS=packed.bias is not None,
    )  # fmt: skip
    return out


def _is_known(kind: LinearEncoding, packed: PackedLinear) -> bool:
    """Return whether a program supports weights with these properties."""
    tensors = packed.tensors
    if packed.layout not in (ROWS, NIBBLES) or not all(one.is_contiguous() for one in tensors.values()):
        return False
    if kind.is_float:
        return True
    if kind.numbers == "e4m3":
        return kind.activation_dtype is None and kind.group_size is not None
    if kind.numbers != "integer" or kind.activation_dtype is None or packed.in_features > _MAX_INPUTS:
        return False
    return kind.group_size in (None, GROUP) and not (kind.group_size is None and kind.has_zero_points)


def _tensor(packed: PackedLinear, name: str) -> Tensor:
    if name == "bias":
        assert packed.bias is not None
        return packed.bias
    return packed.tensors[name]


def _tile_rows(count: int, groups: Groups | None) -> int:
    """Return the rows of a tile: few if a group has few."""
    each = count if groups is None else count // groups.count
    return 16 if each <= 16 else 32 if each <= 32 else 64


def _grid(
    count: int, rows: int, columns: int, packed: PackedLinear, groups: Groups | None
) -> tuple[int, int]:
    tiles = divide_up(count, rows) if groups is None else count // rows + groups.count
    return tiles if count else 0, divide_up(packed.out_features, columns)


def _sorted(x: Tensor, groups: Groups | None) -> tuple[Tensor, Tensor]:
    return (x, x) if groups is None else (groups.rows, groups.starts)
