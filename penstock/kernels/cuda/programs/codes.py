"""Products with weights that are stored as codes of few bits, with a scale per group of inputs.

A code represents a number. A weight is ``number * scale - minimum`` or ``(number - zero) * scale``. With row
scales it is also multiplied by the scale of its output. The constants of the programs describe the format:

* NUMBERS: the numbers that codes represent: "integer" (the code minus OFFSET), "e2m1" (4-bit floats), "e4m3"
  (8-bit floats), or "table" (codes are indices into a table of numbers).
* SCALES: "float", "e8m0" (powers of two), or "e4m3". INPUTS_PER_SCALE inputs share a scale.
  SCALES_PER_FACTOR scales share a factor that multiplies them; 0 if there are no factors.
* MINIMA: "minima" (one per 32 inputs; MINIMA_PER_FACTOR minima share a factor), "zeros" (one zero point per
  scale), or "" for none.

With IS_NIBBLES a weight is stored as `kernels.nibbles` describes, otherwise with one byte per input.
Activations are not quantized. With TO_FLOAT32 they are converted to float32 before the multiplication.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.kernels.cuda.programs.dependent_launch import launch_next_and_wait
from penstock.kernels.cuda.programs.floats8 import e4m3_values
from penstock.kernels.cuda.programs.products import find_tile_rows, group_tensor


class Format(NamedTuple):
    """The constants of a format; the docstring of the module describes them."""

    NUMBERS: tl.constexpr
    OFFSET: tl.constexpr
    SCALES: tl.constexpr
    INPUTS_PER_SCALE: tl.constexpr
    SCALES_PER_FACTOR: tl.constexpr
    MINIMA: tl.constexpr
    MINIMA_PER_FACTOR: tl.constexpr


class Tensors(NamedTuple):
    """Pointers to the table of numbers, and to the scales, minima and factors of a weight."""

    number_table: Any
    scales: Any
    factors: Any
    minima: Any
    min_factors: Any


class Sizes(NamedTuple):
    """The number of inputs, and the row lengths of the tensors in `Tensors` that have rows."""

    in_features: Any
    num_scales: Any
    num_factors: Any
    num_minima: Any
    num_min_factors: Any


@triton.jit
def decode_numbers(codes, number_table, NUMBERS: tl.constexpr, OFFSET: tl.constexpr):
    """Return the number of each code in float32."""
    if NUMBERS == "e4m3":
        return e4m3_values(codes)
    elif NUMBERS == "e2m1":  # a code without its sign, shifted left by 9, is a float16 2**14 times too small
        wide = codes.to(tl.uint16)
        halves = ((wide & 8) << 12) | ((wide & 7) << 9)
        return halves.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    elif NUMBERS == "table":
        return tl.load(number_table + codes.to(tl.int32))
    else:
        return codes.to(tl.float32) - OFFSET


@triton.jit
def load_scales(
    scales,
    factors,
    outputs,
    groups,
    mask,
    num_scales,
    num_factors,
    SCALES: tl.constexpr,
    SCALES_PER_FACTOR: tl.constexpr,
):
    """Return the float32 scales of ``groups`` of ``outputs``, multiplied by their factors if they exist."""
    stored = tl.load(scales + outputs * num_scales + groups, mask=mask, other=0)
    if SCALES == "e8m0":
        bits = stored.to(tl.int32) << 23
        values = tl.where(stored == 0, 5.877471754111438e-39, bits.to(tl.float32, bitcast=True))
        values = tl.where(stored == 255, float("nan"), values)
    elif SCALES == "e4m3":
        values = e4m3_values(stored)
    else:
        values = stored.to(tl.float32)
    if SCALES_PER_FACTOR > 0:
        offsets = outputs * num_factors + groups // SCALES_PER_FACTOR
        values = values * tl.load(factors + offsets, mask=mask, other=0.0).to(tl.float32)
    return values


@triton.jit
def _decode_weights(
    codes,
    first_inputs,
    tensors,
    outputs,
    is_output,
    sizes,
    N: tl.constexpr,
    BYTES: tl.constexpr,
    SUBGROUP: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Return the weights that ``codes [BYTES, N]`` represent, without row scales.

    The inputs of a subgroup of SUBGROUP inputs share a scale. ``first_inputs [BYTES // SUBGROUP]`` has the
    first input of each subgroup. ``outputs [1, N]`` are the outputs of the weights. The weights of
    inputs from ``in_features`` on are finite, so that their products with the zeros in `_add_product` are 0.
    """
    numbers = decode_numbers(codes, tensors.number_table, FORMAT.NUMBERS, FORMAT.OFFSET)
    numbers = tl.reshape(numbers, [BYTES // SUBGROUP, SUBGROUP, N])
    groups = (first_inputs // FORMAT.INPUTS_PER_SCALE)[:, None]
    mask = is_output & (first_inputs < sizes.in_features)[:, None]
    scale = load_scales(
        tensors.scales, tensors.factors, outputs, groups, mask, sizes.num_scales, sizes.num_factors,
        FORMAT.SCALES, FORMAT.SCALES_PER_FACTOR,
    )  # fmt: skip
    if FORMAT.MINIMA == "zeros":
        zero = tl.load(tensors.minima + outputs * sizes.num_scales + groups, mask=mask, other=0)
        zero = zero.to(tl.float32)
        return tl.reshape((numbers - zero[:, None, :]) * scale[:, None, :], [BYTES, N])
    weights = numbers * scale[:, None, :]
    if FORMAT.MINIMA == "minima":
        groups = (first_inputs // 32)[:, None]
        minimum = load_scales(
            tensors.minima, tensors.min_factors, outputs, groups, mask, sizes.num_minima,
            sizes.num_min_factors, "float", FORMAT.MINIMA_PER_FACTOR,
        )  # fmt: skip
        weights -= minimum[:, None, :]
    return tl.reshape(weights, [BYTES, N])


@triton.jit
def _add_product(
    total, x, x_row_stride, x_rows, is_row, inputs, in_features, weights, TO_FLOAT32: tl.constexpr
):
    """Return ``total [M, N]`` plus the product of ``weights`` with the given inputs of the rows of ``x``."""
    offsets = x_rows[:, None] * x_row_stride + inputs[None, :]
    values = tl.load(x + offsets, mask=is_row[:, None] & (inputs < in_features)[None, :], other=0.0)
    if TO_FLOAT32:
        values = values.to(tl.float32)
    return total + tl.dot(values, weights.to(values.dtype), input_precision="ieee")


@triton.jit
def multiply_codes(
    out,
    x,
    weight,
    weight_addresses,
    scales,
    scale_addresses,
    factors,
    factor_addresses,
    minima,
    minimum_addresses,
    min_factors,
    min_factor_addresses,
    row_scales,
    row_scale_addresses,
    bias,
    bias_addresses,
    number_table,
    rows,
    group_starts,
    num_rows,
    num_groups,
    out_features,
    in_features,
    x_row_stride,
    weight_row_bytes,
    num_scales,
    num_factors,
    num_minima,
    num_min_factors,
    M: tl.constexpr,
    N: tl.constexpr,
    BYTES: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TO_FLOAT32: tl.constexpr,
    IS_NIBBLES: tl.constexpr,
    NUMBERS: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALES: tl.constexpr,
    INPUTS_PER_SCALE: tl.constexpr,
    SCALES_PER_FACTOR: tl.constexpr,
    MINIMA: tl.constexpr,
    MINIMA_PER_FACTOR: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
):
    """Compute one tile of a product of rows. The grid is the same as in `products.multiply_floats`.

    GROUPS includes POINTERS and GATHERS of that program: each group of rows has separate tensors, at the
    addresses in the arguments ``..._addresses``, and position p reads the row ``rows[p]`` of ``x``.
    Weights are rounded to the type of ``x``, or are float32 with TO_FLOAT32. With SPLITS above 1, a third
    dimension of the grid divides the inputs into splits. ``out [SPLITS, T, out]`` then has the float32 sum of
    each split, without row scales and bias. `add_splits` adds these sums.
    """
    group, positions, is_row = find_tile_rows(group_starts, num_rows, num_groups, M, GROUPS)
    weight = group_tensor(weight, weight_addresses, group, 0, False, GROUPS)
    scales = group_tensor(scales, scale_addresses, group, 0, False, GROUPS)
    if SCALES_PER_FACTOR > 0:
        factors = group_tensor(factors, factor_addresses, group, 0, False, GROUPS)
    if MINIMA != "":
        minima = group_tensor(minima, minimum_addresses, group, 0, False, GROUPS)
    if MINIMA_PER_FACTOR > 0:
        min_factors = group_tensor(min_factors, min_factor_addresses, group, 0, False, GROUPS)
    x_rows = positions.to(tl.int64)
    if GROUPS:
        x_rows = tl.load(rows + positions, mask=is_row, other=0)
    outputs = tl.program_id(1) * N + tl.arange(0, N)
    is_output = outputs < out_features
    output_rows = outputs.to(tl.int64)[None, :]
    total = tl.zeros([M, N], tl.float32)
    SUBGROUP: tl.constexpr = 16 if INPUTS_PER_SCALE == 16 else 32
    FORMAT: tl.constexpr = Format(
        NUMBERS, OFFSET, SCALES, INPUTS_PER_SCALE, SCALES_PER_FACTOR, MINIMA, MINIMA_PER_FACTOR
    )
    tensors = Tensors(number_table, scales, factors, minima, min_factors)
    sizes = Sizes(in_features, num_scales, num_factors, num_minima, num_min_factors)
    subgroup_starts = tl.arange(0, BYTES // SUBGROUP) * SUBGROUP
    begin_byte = tl.program_id(2) * 0
    end_byte = begin_byte + weight_row_bytes
    if SPLITS > 1:
        split_bytes = (weight_row_bytes + SPLITS * BYTES - 1) // (SPLITS * BYTES) * BYTES
        begin_byte = tl.program_id(2) * split_bytes
        end_byte = tl.minimum(begin_byte + split_bytes, weight_row_bytes)
    for begin in range(begin_byte, end_byte, BYTES):
        columns = begin + tl.arange(0, BYTES)
        mask = is_output[None, :] & (columns < weight_row_bytes)[:, None]
        codes = tl.load(weight + output_rows * weight_row_bytes + columns[:, None], mask=mask, other=0)
        if IS_NIBBLES:
            inputs = columns // 32 * 64 + columns % 32
            first_inputs = (begin + subgroup_starts) // 32 * 64 + subgroup_starts % 32
            low = _decode_weights(
                codes & 15, first_inputs, tensors, output_rows, is_output[None, :], sizes, N, BYTES, SUBGROUP,
                FORMAT,
            )  # fmt: skip
            total = _add_product(total, x, x_row_stride, x_rows, is_row, inputs, in_features, low, TO_FLOAT32)
            inputs += 32
            high = _decode_weights(
                codes >> 4, first_inputs + 32, tensors, output_rows, is_output[None, :], sizes, N, BYTES,
                SUBGROUP, FORMAT,
            )  # fmt: skip
            total = _add_product(
                total, x, x_row_stride, x_rows, is_row, inputs, in_features, high, TO_FLOAT32
            )
        else:
            whole = _decode_weights(
                codes, begin + subgroup_starts, tensors, output_rows, is_output[None, :], sizes, N, BYTES,
                SUBGROUP, FORMAT,
            )  # fmt: skip
            total = _add_product(
                total, x, x_row_stride, x_rows, is_row, columns, in_features, whole, TO_FLOAT32
            )
    if SPLITS > 1:
        out += tl.program_id(2).to(tl.int64) * num_rows * out_features
    else:
        if HAS_ROW_SCALES:
            pointer = group_tensor(row_scales, row_scale_addresses, group, 0, False, GROUPS)
            total = total * tl.load(pointer + outputs, mask=is_output, other=0.0)[None, :]
        if HAS_BIAS:
            pointer = group_tensor(bias, bias_addresses, group, 0, False, GROUPS)
            total += tl.load(pointer + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    offsets = positions.to(tl.int64)[:, None] * out_features + outputs[None, :]
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def add_splits(
    out,
    split_sums,
    row_scales,
    bias,
    num_rows,
    out_features,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the splits of `multiply_codes` in order, and apply row scales and bias.

    Grid: rows, tiles of WIDTH outputs.
    """
    launch_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_output = outputs < out_features
    total = tl.zeros([WIDTH], tl.float32)
    for split in tl.static_range(SPLITS):
        offsets = (row + split * num_rows) * out_features + outputs
        total += tl.load(split_sums + offsets, mask=is_output, other=0.0)
    if HAS_ROW_SCALES:
        total = total * tl.load(row_scales + outputs, mask=is_output, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + row * out_features + outputs, total.to(out.dtype.element_ty), mask=is_output)


@triton.jit
def decode_weight(
    out,
    weight,
    number_table,
    scales,
    factors,
    minima,
    min_factors,
    row_scales,
    out_features,
    in_features,
    weight_row_bytes,
    num_scales,
    num_factors,
    num_minima,
    num_min_factors,
    N: tl.constexpr,
    IS_NIBBLES: tl.constexpr,
    NUMBERS: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALES: tl.constexpr,
    INPUTS_PER_SCALE: tl.constexpr,
    SCALES_PER_FACTOR: tl.constexpr,
    MINIMA: tl.constexpr,
    MINIMA_PER_FACTOR: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
):
    """Write the weights of N outputs and 32 inputs as floats; of 64 inputs with IS_NIBBLES.

    Grid: tiles of outputs, tiles of inputs.
    """
    outputs = tl.program_id(0) * N + tl.arange(0, N)
    output_rows = outputs.to(tl.int64)[None, :]
    is_output = (outputs < out_features)[None, :]
    begin = tl.program_id(1) * 32
    columns = begin + tl.arange(0, 32)
    mask = is_output & (columns < weight_row_bytes)[:, None]
    stored = tl.load(weight + output_rows * weight_row_bytes + columns[:, None], mask=mask, other=0)
    output_scales = 1.0
    if HAS_ROW_SCALES:
        output_scales = tl.load(row_scales + output_rows, mask=is_output, other=0.0)
    HALVES: tl.constexpr = 2 if IS_NIBBLES else 1
    SUBGROUP: tl.constexpr = 16 if INPUTS_PER_SCALE == 16 else 32
    FORMAT: tl.constexpr = Format(
        NUMBERS, OFFSET, SCALES, INPUTS_PER_SCALE, SCALES_PER_FACTOR, MINIMA, MINIMA_PER_FACTOR
    )
    tensors = Tensors(number_table, scales, factors, minima, min_factors)
    sizes = Sizes(in_features, num_scales, num_factors, num_minima, num_min_factors)
    for half in tl.static_range(HALVES):
        first = begin * HALVES + half * 32
        inputs = first + tl.arange(0, 32)
        codes = stored
        if IS_NIBBLES:
            codes = (stored >> (4 * half)) & 15
        first_inputs = first + tl.arange(0, 32 // SUBGROUP) * SUBGROUP
        weights = _decode_weights(
            codes, first_inputs, tensors, output_rows, is_output, sizes, N, 32, SUBGROUP, FORMAT
        )
        weights = weights * output_scales
        mask = is_output & (inputs < in_features)[:, None]
        tl.store(
            out + output_rows * in_features + inputs[:, None], weights.to(out.dtype.element_ty), mask=mask
        )
