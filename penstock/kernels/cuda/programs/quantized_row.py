"""The product of one row with a weight that is stored as codes; `programs.codes` describes the formats."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.cuda.programs.codes import Format, Sizes, Tensors, decode_numbers, load_scales
from penstock.kernels.cuda.programs.dependent_launch import launch_next, wait_for_previous


@triton.jit
def _sum_inputs(
    codes,
    inputs,
    first_inputs,
    x,
    tensors,
    outputs,
    is_output,
    sizes,
    N: tl.constexpr,
    BYTES: tl.constexpr,
    SUBGROUP: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Return the dot products ``[N]`` of the inputs and the weights that ``codes [N, BYTES]`` represent.

    The inputs of a subgroup of SUBGROUP inputs share a scale. ``first_inputs [BYTES // SUBGROUP]`` has the
    first input of each subgroup.
    """
    values = tl.load(x + inputs, mask=inputs < sizes.in_features, other=0.0).to(tl.float32)
    products = decode_numbers(codes, tensors.number_table, FORMAT.NUMBERS, FORMAT.OFFSET) * values[None, :]
    sums = tl.sum(tl.reshape(products, [N, BYTES // SUBGROUP, SUBGROUP]), 2)
    output_rows = outputs.to(tl.int64)[:, None]
    mask = is_output[:, None] & (first_inputs < sizes.in_features)[None, :]
    groups = (first_inputs // FORMAT.INPUTS_PER_SCALE)[None, :]
    scale = load_scales(
        tensors.scales, tensors.factors, output_rows, groups, mask, sizes.num_scales, sizes.num_factors,
        FORMAT.SCALES, FORMAT.SCALES_PER_FACTOR,
    )  # fmt: skip
    if FORMAT.MINIMA == "":
        return tl.sum(sums * scale, 1)
    input_sums = tl.sum(tl.reshape(values, [BYTES // SUBGROUP, SUBGROUP]), 1)[None, :]
    if FORMAT.MINIMA == "zeros":
        zero = tl.load(tensors.minima + output_rows * sizes.num_scales + groups, mask=mask, other=0).to(
            tl.float32
        )
        return tl.sum((sums - input_sums * zero) * scale, 1)
    else:
        groups = (first_inputs // 32)[None, :]
        minimum = load_scales(
            tensors.minima, tensors.min_factors, output_rows, groups, mask, sizes.num_minima,
            sizes.num_min_factors, "float", FORMAT.MINIMA_PER_FACTOR,
        )  # fmt: skip
        return tl.sum(sums * scale - input_sums * minimum, 1)


@triton.jit
def multiply_quantized_row(
    out,
    x,
    weight,
    number_table,
    scales,
    factors,
    minima,
    min_factors,
    row_scales,
    bias,
    out_features,
    in_features,
    weight_row_bytes,
    num_scales,
    num_factors,
    num_minima,
    num_min_factors,
    N: tl.constexpr,
    BYTES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_NIBBLES: tl.constexpr,
    NUMBERS: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALES: tl.constexpr,
    INPUTS_PER_SCALE: tl.constexpr,
    SCALES_PER_FACTOR: tl.constexpr,
    MINIMA: tl.constexpr,
    MINIMA_PER_FACTOR: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute N outputs of the product of one row with a weight, plus the bias. Grid: tiles of outputs.

    With PDL, the first BYTES bytes of each output's weights are read while the previous kernel may still run.
    """
    launch_next(PDL)
    SUBGROUP: tl.constexpr = 16 if INPUTS_PER_SCALE == 16 else 32
    FORMAT: tl.constexpr = Format(
        NUMBERS, OFFSET, SCALES, INPUTS_PER_SCALE, SCALES_PER_FACTOR, MINIMA, MINIMA_PER_FACTOR
    )
    tensors = Tensors(number_table, scales, factors, minima, min_factors)
    sizes = Sizes(in_features, num_scales, num_factors, num_minima, num_min_factors)
    outputs = tl.program_id(0) * N + tl.arange(0, N)
    is_output = outputs < out_features
    columns = tl.arange(0, BYTES)
    subgroup_starts = tl.arange(0, BYTES // SUBGROUP) * SUBGROUP
    weight_rows = weight + outputs.to(tl.int64)[:, None] * weight_row_bytes
    mask = is_output[:, None] & (columns < weight_row_bytes)[None, :]
    codes = tl.load(weight_rows + columns[None, :], mask=mask, other=0, eviction_policy="evict_first")
    wait_for_previous(PDL)
    total = tl.zeros([N], tl.float32)
    for begin in range(0, weight_row_bytes, BYTES):
        if begin > 0:
            mask = is_output[:, None] & (begin + columns < weight_row_bytes)[None, :]
            codes = tl.load(
                weight_rows + (begin + columns)[None, :], mask=mask, other=0, eviction_policy="evict_first"
            )
        if IS_NIBBLES:
            inputs = (begin + columns) // 32 * 64 + columns % 32
            first_inputs = (begin + subgroup_starts) // 32 * 64 + subgroup_starts % 32
            total += _sum_inputs(
                codes & 15,
                inputs,
                first_inputs,
                x,
                tensors,
                outputs,
                is_output,
                sizes,
                N,
                BYTES,
                SUBGROUP,
                FORMAT,
            )
            total += _sum_inputs(
                codes >> 4, inputs + 32, first_inputs + 32, x, tensors, outputs, is_output, sizes, N, BYTES,
                SUBGROUP, FORMAT,
            )  # fmt: skip
        else:
            total += _sum_inputs(
                codes, begin + columns, begin + subgroup_starts, x, tensors, outputs, is_output, sizes, N,
                BYTES, SUBGROUP, FORMAT,
            )  # fmt: skip
    if HAS_ROW_SCALES:
        total = total * tl.load(row_scales + outputs, mask=is_output, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + outputs, total.to(out.dtype.element_ty), mask=is_output)
