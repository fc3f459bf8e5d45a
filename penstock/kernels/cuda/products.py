"""Products of rows with one packed weight, or of several groups of rows with one weight per group."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.cuda.codes import MAX_TILED_ROWS, multiply_codes
from penstock.kernels.cuda.launch import divide_up, launch, power_of_two, row_stride
from penstock.kernels.cuda.programs import products as programs
from penstock.kernels.cuda.programs import quantization
from penstock.kernels.cuda.weight_tables import (
    Groups,
    WeightTables,
    product_grid,
    sorted_rows,
    tile_outputs,
    tile_rows,
)
from penstock.kernels.linear import PackedLinear
from penstock.kernels.quantized import INPUTS_PER_EXTRA, MAX_EXTRAS

_TILE_INPUTS = 64
"""Number of inputs per tile. The number is fixed, because the order of additions depends on it."""
_MAX_ROW_WEIGHTS, _MAX_ROW_INPUTS = 8192, 4096
"""Maximum number of weights, and of inputs, that a program for a single row reads at once."""


def multiply_floats(
    x: Tensor, weights: WeightTables, groups: Groups | None, *, is_deterministic: bool
) -> Tensor:
    """Return the product of rows with weights of floats, plus the bias.

    Args:
        x: ``[T, in]``.
        weights: one weight, or one weight per group.
        groups: the rows of ``x`` to multiply by each weight. None: all rows are multiplied by one weight.
        is_deterministic: whether the bits of a row must be independent of the number of rows.

    Returns:
        ``[T, out]``. With groups, ``[P, out]``: one row per entry of ``groups.rows [P]``, in their order.
    """
    packed = weights.first_linear
    result_rows = len(x) if groups is None else len(groups.rows)
    out = torch.empty((result_rows, packed.out_features), dtype=x.dtype, device=x.device)
    weight = packed.tensors["weight"]
    converts_to_float32 = x.dtype == torch.float32 or weight.dtype != x.dtype
    rows_per_tile = tile_rows(result_rows, groups, is_deterministic=is_deterministic)
    launch(
        programs.multiply_floats, product_grid(result_rows, rows_per_tile, 64, packed, groups), out, x,
        *weights.arguments("weight", "bias"), *sorted_rows(x, groups), x, result_rows,
        1 if groups is None else groups.num_groups, packed.out_features, packed.in_features, row_stride(x),
        row_stride(out), *weight.stride(), 0, M=rows_per_tile, N=64, INPUTS=_TILE_INPUTS,
        GROUPS=groups is not None, POINTERS=groups is not None, GATHERS=groups is not None, SCATTERS=False,
        ADDS=False, LIMITS="", HAS_BIAS=packed.bias is not None, TO_FLOAT32=converts_to_float32,
    )  # fmt: skip
    return out


def multiply_row(x: Tensor, packed: PackedLinear) -> Tensor:
    """Return the product ``[1, out]`` of a single row with a weight of floats, plus the bias."""
    weight, bias = packed.tensors["weight"], packed.bias
    num_outputs, num_inputs = packed.out_features, packed.in_features
    out = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
    inputs_per_tile = min(power_of_two(num_inputs, 16), _MAX_ROW_INPUTS)
    outputs_per_tile = max(_MAX_ROW_WEIGHTS // inputs_per_tile, 1)
    launch(
        programs.multiply_row, (divide_up(num_outputs, outputs_per_tile),), out, x, weight,
        weight if bias is None else bias, num_outputs, num_inputs, N=outputs_per_tile, INPUTS=inputs_per_tile,
        HAS_BIAS=bias is not None, is_dependent=True,
    )  # fmt: skip
    return out


def multiply_encoded(
    x: Tensor, weights: WeightTables, groups: Groups | None, *, is_deterministic: bool
) -> Tensor:
    """Return the product of rows with quantized weights, plus the bias. Arguments as in `multiply_floats`."""
    has_scale_per_output = weights.encoding.number_format == "integer" and weights.encoding.group_size is None
    if has_scale_per_output and (groups is not None or is_deterministic or len(x) <= MAX_TILED_ROWS):
        return multiply_integers(x, weights, groups)
    return multiply_codes(x, weights, groups, is_deterministic=is_deterministic)


def multiply_integers(x: Tensor, weights: WeightTables, groups: Groups | None) -> Tensor:
    """Return the product of rows with int8 weights that have one scale per output, plus the bias.

    The rows are quantized to integers first, and sums of integers are exact. Arguments and result as in
    `multiply_floats`.
    """
    packed, (num_rows, in_features) = weights.first_linear, x.shape
    integers = torch.empty((2, num_rows, in_features), dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    has_wide_integers = torch.empty(num_rows, dtype=torch.int32, device=x.device)
    max_extras = min(MAX_EXTRAS, in_features // INPUTS_PER_EXTRA)
    launch(
        quantization.quantize_rows, (num_rows,), integers, scales, has_wide_integers, x, num_rows,
        in_features, row_stride(x), max_extras, is_dependent=True, WIDTH=power_of_two(in_features),
        num_warps=8,
    )  # fmt: skip
    result_rows = num_rows if groups is None else len(groups.rows)
    out = torch.empty((result_rows, packed.out_features), dtype=x.dtype, device=x.device)
    if num_rows == 1 and groups is None:
        inputs_per_tile = min(power_of_two(in_features, 32), _MAX_ROW_INPUTS)
        outputs_per_tile = max(_MAX_ROW_WEIGHTS // inputs_per_tile, 1)
        grid = (divide_up(packed.out_features, outputs_per_tile),)
        launch(
            programs.multiply_integer_row, grid, out, integers, scales,
            has_wide_integers, *weights.arguments("weight", "scales", "bias")[::2], packed.out_features,
            in_features, N=outputs_per_tile, INPUTS=inputs_per_tile, HAS_BIAS=packed.bias is not None,
            is_dependent=True,
        )  # fmt: skip
        return out
    rows_per_tile, outputs_per_tile = (
        tile_rows(result_rows, groups),
        tile_outputs(result_rows, packed, groups, x.device),
    )
    launch(
        programs.multiply_integer_rows,
        product_grid(result_rows, rows_per_tile, outputs_per_tile, packed, groups), out, integers, scales,
        has_wide_integers, *weights.arguments("weight", "scales", "bias"), *sorted_rows(x, groups),
        result_rows, 1 if groups is None else groups.num_groups, num_rows, packed.out_features, in_features,
        M=rows_per_tile, N=outputs_per_tile, INPUTS=_TILE_INPUTS, GROUPS=groups is not None,
        GATHERS=groups is not None, HAS_BIAS=packed.bias is not None,
    )  # fmt: skip
    return out
