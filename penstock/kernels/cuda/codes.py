"""Products with weights that are stored as low-bit codes (`programs.codes`).

Programs for few rows decode the codes in registers while they multiply. For many rows, the whole weight is
decoded to floats in memory first, and cuBLAS multiplies. Products whose rows are grouped by weight, or whose
result must be deterministic, decode in registers for any number of rows.
"""

from __future__ import annotations

from functools import cache
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.cuda.launch import divide_up, launch, num_processors, power_of_two, row_stride
from penstock.kernels.cuda.programs import codes as programs
from penstock.kernels.cuda.programs.quantized_row import multiply_quantized_row
from penstock.kernels.cuda.weight_tables import (
    Groups,
    WeightTables,
    product_grid,
    sorted_rows,
    tile_rows,
)
from penstock.kernels.encodings import LinearEncoding
from penstock.kernels.encodings._sizes import GROUP, SUPERBLOCK
from penstock.kernels.linear import PackedLinear
from penstock.kernels.nibbles import NIBBLES, signed_offset

_SINGLE_ROW_TILE_BYTES, _MAX_SINGLE_ROW_OUTPUT_BYTES = 8192, 2048
"""Bytes of a weight that one program of `_multiply_row` reads at once: in total, and at most per output."""
MAX_TILED_ROWS = 64
"""Maximum number of rows for which the codes are decoded in registers, unless rows are grouped by weight or
the result must be deterministic. With more rows, the weight is decoded to memory, and cuBLAS multiplies."""
_TILE_OUTPUTS, _TILE_BYTES = 64, 64
"""Outputs of a tile, and bytes per output that the tile multiplies at once.

Another number of bytes changes the order of additions, and so the bits of results.
"""
_MAX_SPLITS, _MIN_STEPS = 16, 4
"""Maximum number of splits of the inputs, and approximate minimum of steps of `_TILE_BYTES` per split."""
_ADD_TILE_OUTPUTS = 1024
"""Number of outputs per program of `add_splits`."""
_ALL_INPUTS = 1 << 30
"""``INPUTS_PER_SCALE`` of formats with one scale per output: more than any number of inputs."""


class _Format(TypedDict):
    """The constants of a format of codes; `programs.codes` describes them."""

    IS_NIBBLES: bool
    NUMBERS: str
    OFFSET: int
    SCALES: str
    INPUTS_PER_SCALE: int
    SCALES_PER_FACTOR: int
    MINIMA: str
    MINIMA_PER_FACTOR: int
    HAS_ROW_SCALES: bool


def multiply_codes(
    x: Tensor, weights: WeightTables, groups: Groups | None, *, is_deterministic: bool
) -> Tensor:
    """Return the product of rows with weights that are stored as codes, plus the bias.

    Activations are not quantized.

    Args:
        x: ``[T, in]``.
        weights: one weight, or one weight per group.
        groups: the rows of ``x`` to multiply by each weight. None: all rows are multiplied by one weight.
        is_deterministic: whether the bits of a row must be independent of the number of rows.

    Returns:
        ``[T, out]``. With groups, ``[P, out]``: one row per entry of ``groups.rows [P]``, in their order.
    """
    if groups is None and not is_deterministic:
        if len(x) == 1:
            return _multiply_row(x, weights)
        if len(x) > MAX_TILED_ROWS:
            bias = weights.first_linear.bias
            weight = decode(weights, x.dtype)
            return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    packed = weights.first_linear
    num_rows = len(x) if groups is None else len(groups.rows)
    out = torch.empty((num_rows, packed.out_features), dtype=x.dtype, device=x.device)
    rows_per_tile = tile_rows(num_rows, groups, is_deterministic=is_deterministic)
    grid = product_grid(num_rows, rows_per_tile, _TILE_OUTPUTS, packed, groups)
    num_splits = 1
    if groups is None and not is_deterministic:
        num_splits = _count_splits(grid[0] * grid[1], packed.tensors["weight"].shape[1], x.device)
    sums = (
        out
        if num_splits == 1
        else torch.empty((num_splits, *out.shape), dtype=torch.float32, device=x.device)
    )
    tensor_names, constants = (
        _tensor_names(weights.encoding),
        _format_constants(weights.encoding, packed.layout == NIBBLES),
    )
    # The program applies row scales after the product. Before that, weights with zero points, or with row
    # scales and minima, may exceed the range of float16.
    minima = constants["MINIMA"]
    may_exceed_float16 = minima == "zeros" or (minima != "" and constants["HAS_ROW_SCALES"])
    converts_to_float32 = x.dtype == torch.float32 or (x.dtype == torch.float16 and may_exceed_float16)
    launch(
        programs.multiply_codes, (*grid, num_splits), sums, x, *weights.arguments(*tensor_names, "bias"),
        _number_table(weights), *sorted_rows(x, groups), num_rows, 1 if groups is None else groups.num_groups,
        packed.out_features, packed.in_features, row_stride(x), *_row_lengths(packed), M=rows_per_tile,
        N=_TILE_OUTPUTS, BYTES=_TILE_BYTES, SPLITS=num_splits,
        GROUPS=groups is not None, HAS_BIAS=packed.bias is not None,
        TO_FLOAT32=converts_to_float32, **constants,
    )  # fmt: skip
    if num_splits > 1:
        row_scales, _, bias, _ = weights.arguments("row_scales", "bias")
        launch(
            programs.add_splits, (num_rows, divide_up(packed.out_features, _ADD_TILE_OUTPUTS)), out, sums,
            row_scales, bias, num_rows, packed.out_features, SPLITS=num_splits, WIDTH=_ADD_TILE_OUTPUTS,
            HAS_ROW_SCALES=constants["HAS_ROW_SCALES"], HAS_BIAS=packed.bias is not None, is_dependent=True,
        )  # fmt: skip
    return out


def _count_splits(num_tiles: int, bytes_per_row: int, device: torch.device) -> int:
    """Return the number of splits of the inputs: 1, or more if there are too few tiles to fill the device.

    ``bytes_per_row`` are the bytes of a row of the weight.
    """
    target_splits = 2 * num_processors(device) // max(num_tiles, 1)
    max_splits = bytes_per_row // (_MIN_STEPS * _TILE_BYTES)
    return max(1, min(power_of_two(target_splits), power_of_two(max_splits), _MAX_SPLITS))


def decode(weights: WeightTables, dtype: torch.dtype) -> Tensor:
    """Return a single weight ``[out, in]`` as floats of type ``dtype``."""
    packed = weights.first_linear
    weight = packed.tensors["weight"]
    out = torch.empty((packed.out_features, packed.in_features), dtype=dtype, device=weight.device)
    launch(
        programs.decode_weight, (divide_up(packed.out_features, 64), divide_up(weight.shape[1], GROUP)), out,
        *_program_tensors(weights), packed.out_features, packed.in_features, *_row_lengths(packed), N=64,
        **_format_constants(weights.encoding, packed.layout == NIBBLES),
    )  # fmt: skip
    return out


def _multiply_row(x: Tensor, weights: WeightTables) -> Tensor:
    """Return the product ``[1, out]`` of a single row ``x [1, in]`` with a single weight, plus the bias."""
    packed = weights.first_linear
    weight, bias = packed.tensors["weight"], packed.bias
    out = torch.empty((1, packed.out_features), dtype=x.dtype, device=x.device)
    bytes_per_output = min(power_of_two(weight.shape[1], 32), _MAX_SINGLE_ROW_OUTPUT_BYTES)
    outputs_per_tile = max(_SINGLE_ROW_TILE_BYTES // bytes_per_output, 1)
    grid = (divide_up(packed.out_features, outputs_per_tile),)
    launch(
        multiply_quantized_row, grid, out, x, *_program_tensors(weights),
        weight if bias is None else bias, packed.out_features, packed.in_features, *_row_lengths(packed),
        N=outputs_per_tile, BYTES=bytes_per_output, HAS_BIAS=bias is not None, is_dependent=True,
        **_format_constants(weights.encoding, packed.layout == NIBBLES),
    )  # fmt: skip
    return out


def _program_tensors(weights: WeightTables) -> list[Tensor]:
    """Return the tensors of a single weight in the order of the program arguments.

    Missing tensors are replaced by placeholders.
    """
    tensors = weights.arguments(*_tensor_names(weights.encoding))[::2]
    return [tensors[0], _number_table(weights), *tensors[1:]]


def _tensor_names(encoding: LinearEncoding) -> tuple[str, ...]:
    """Return the names of the tensors of a weight, in the order of the program arguments."""
    has_no_blocks = encoding.block_kind is None
    return (
        "weight",
        "scales",
        "factors",
        "zeros" if has_no_blocks else "minima",
        "min_factors",
        "row_scales",
    )


def _number_table(weights: WeightTables) -> Tensor:
    """Return the table of numbers if codes are indices into a table, else a placeholder."""
    kind, weight = weights.encoding.block_kind, weights.first_linear.tensors["weight"]
    if kind is None or kind.table is None:
        return weight
    return _numbers_on_device(kind.table.numbers, weight.device)


@cache
def _numbers_on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def _row_lengths(packed: PackedLinear) -> list[int]:
    """Return the elements per row of the weight, scales, factors, minima and min_factors; 0 if missing."""
    names = ("weight", "scales", "factors", "minima", "min_factors")
    tensors = [packed.tensors.get(name) for name in names]
    return [0 if tensor is None else tensor[0].numel() for tensor in tensors]


@cache
def _format_constants(encoding: LinearEncoding, is_nibbles: bool) -> _Format:
    """Return the program constants for an encoding. ``is_nibbles`` is whether the layout is `NIBBLES`."""
    kind = encoding.block_kind
    if kind is None:
        return {
            "IS_NIBBLES": is_nibbles,
            "NUMBERS": encoding.number_format or "integer",
            "OFFSET": signed_offset(encoding) if is_nibbles else 0,
            "SCALES": "float",
            "INPUTS_PER_SCALE": encoding.group_size or _ALL_INPUTS,
            "SCALES_PER_FACTOR": 0,
            "MINIMA": "zeros" if encoding.has_zero_points else "",
            "MINIMA_PER_FACTOR": 0,
            "HAS_ROW_SCALES": encoding.has_zero_points,
        }
    return {
        "IS_NIBBLES": is_nibbles,
        "NUMBERS": "table" if kind.table else "e2m1" if kind.are_floats else "integer",
        "OFFSET": kind.offset,
        "SCALES": kind.scale_type if kind.scale_type in ("e8m0", "e4m3") else "float",
        "INPUTS_PER_SCALE": kind.scaled_inputs,
        "SCALES_PER_FACTOR": SUPERBLOCK // kind.scaled_inputs if kind.has_superblocks else 0,
        "MINIMA": "minima" if kind.min_type else "",
        "MINIMA_PER_FACTOR": SUPERBLOCK // GROUP if kind.min_type and kind.has_superblocks else 0,
        "HAS_ROW_SCALES": kind.has_row_scales,
    }
