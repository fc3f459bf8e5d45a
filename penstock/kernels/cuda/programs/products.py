"""Matrix products with floats, and with integers that have one scale per output; the sum over experts.

A product multiplies all rows by one weight, or, with GROUPS, each group of rows by a separate weight. The
rows are sorted by group: the rows of group g are at the positions ``group_starts[g]:group_starts[g + 1]`` of
this order. With GATHERS, position p reads the row ``rows[p]`` of ``x``. With SCATTERS, it writes the row
``rows[p]`` of ``out``. The weights of consecutive groups are ``group_stride`` apart, or, with POINTERS, at
the addresses ``weight_addresses[g]``. A tile has M rows and N outputs.

The inputs of a row are summed in tiles of fixed size and in fixed order, independent of the other rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.cuda.programs.dependent_launch import launch_next, wait_for_previous
from penstock.kernels.cuda.programs.tiles import find_tile_group


@triton.jit
def find_tile_rows(group_starts, num_rows, num_groups, M: tl.constexpr, GROUPS: tl.constexpr):
    """Return the group of this program's tile, the positions of the tile, and which positions have a row."""
    if GROUPS:
        group, row = find_tile_group(group_starts, tl.program_id(0), num_groups, M)
        positions = row + tl.arange(0, M)
        begin = tl.load(group_starts + group)
        end = tl.load(group_starts + group + 1)
        return group, positions, (positions >= begin) & (positions < end)
    else:
        positions = tl.program_id(0) * M + tl.arange(0, M)
        return tl.program_id(0) * 0, positions, positions < num_rows


@triton.jit
def group_tensor(pointer, addresses, group, group_stride, GROUPS: tl.constexpr, POINTERS: tl.constexpr):
    """Return a pointer to the tensor of a group; without GROUPS and POINTERS, to the only tensor."""
    if POINTERS:
        return tl.load(addresses + group).to(pointer.dtype)
    elif GROUPS:
        return pointer + group.to(tl.int64) * group_stride
    else:
        return pointer


@triton.jit
def multiply_floats(
    out,
    x,
    weight,
    weight_addresses,
    bias,
    bias_addresses,
    rows,
    group_starts,
    limits,
    num_rows,
    num_groups,
    out_features,
    in_features,
    x_row_stride,
    out_row_stride,
    weight_out_stride,
    weight_in_stride,
    group_stride,
    M: tl.constexpr,
    N: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    POINTERS: tl.constexpr,
    GATHERS: tl.constexpr,
    SCATTERS: tl.constexpr,
    ADDS: tl.constexpr,
    LIMITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TO_FLOAT32: tl.constexpr,
):
    """Compute one tile of ``x @ weight.T + bias``. Grid: tiles of rows, tiles of outputs.

    With LIMITS "out" or "in", group g has only ``limits[g]`` outputs or inputs. With ADDS the product is
    added to ``out``. With TO_FLOAT32, ``x`` and the weight are converted to float32 before the
    multiplication. Otherwise the weight is converted to the type of ``x``.
    """
    group, positions, is_row = find_tile_rows(group_starts, num_rows, num_groups, M, GROUPS)
    weight = group_tensor(weight, weight_addresses, group, group_stride, GROUPS, POINTERS)
    x_rows = positions.to(tl.int64)
    out_rows = positions.to(tl.int64)
    if GATHERS or SCATTERS:
        group_rows = tl.load(rows + positions, mask=is_row, other=0)
        x_rows = group_rows if GATHERS else x_rows
        out_rows = group_rows if SCATTERS else out_rows
    outputs = tl.program_id(1) * N + tl.arange(0, N)
    num_outputs = out_features
    num_inputs = in_features
    if LIMITS == "out":
        num_outputs = tl.load(limits + group).to(tl.int32)
    if LIMITS == "in":
        num_inputs = tl.load(limits + group).to(tl.int32)
    is_output = outputs < num_outputs
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, num_inputs, INPUTS):
        inputs = start + tl.arange(0, INPUTS)
        is_input = inputs < num_inputs
        values = tl.load(
            x + x_rows[:, None] * x_row_stride + inputs[None, :],
            mask=is_row[:, None] & is_input[None, :],
            other=0.0,
        )
        weight_offsets = (
            outputs.to(tl.int64)[None, :] * weight_out_stride + inputs[:, None] * weight_in_stride
        )
        numbers = tl.load(weight + weight_offsets, mask=is_output[None, :] & is_input[:, None], other=0)
        if TO_FLOAT32:
            values = values.to(tl.float32)
        total += tl.dot(values, numbers.to(values.dtype), input_precision="ieee")
    offsets = out_rows[:, None] * out_row_stride + outputs[None, :]
    mask = is_row[:, None] & (outputs < out_features)[None, :]
    dtype = out.dtype.element_ty
    if HAS_BIAS:
        pointer = group_tensor(bias, bias_addresses, group, 0, False, POINTERS)
        total += tl.load(pointer + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    if ADDS:
        total += tl.load(out + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, total.to(dtype), mask=mask)


@triton.jit
def multiply_row(
    out,
    x,
    weight,
    bias,
    out_features,
    in_features,
    N: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute N outputs of the product of one row with a weight ``[out, in]``. Grid: tiles of outputs.

    With PDL, the first INPUTS columns of the weight are read while the previous kernel may still run.
    """
    launch_next(PDL)
    outputs = tl.program_id(0) * N + tl.arange(0, N)
    is_output = outputs < out_features
    inputs = tl.arange(0, INPUTS)
    weight_rows = weight + outputs.to(tl.int64)[:, None] * in_features
    mask = is_output[:, None] & (inputs < in_features)[None, :]
    numbers = tl.load(weight_rows + inputs[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    wait_for_previous(PDL)
    values = tl.load(x + inputs, mask=inputs < in_features, other=0.0).to(tl.float32)
    total = tl.sum(numbers.to(tl.float32) * values[None, :], 1)
    for begin in range(INPUTS, in_features, INPUTS):
        columns = begin + inputs
        mask = is_output[:, None] & (columns < in_features)[None, :]
        numbers = tl.load(weight_rows + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        values = tl.load(x + columns, mask=columns < in_features, other=0.0).to(tl.float32)
        total += tl.sum(numbers.to(tl.float32) * values[None, :], 1)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + outputs, total.to(out.dtype.element_ty), mask=is_output)


@triton.jit
def multiply_integer_row(
    out,
    x,
    x_scales,
    has_wide_integers,
    weight,
    scales,
    bias,
    out_features,
    in_features,
    N: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute N outputs of the product of one quantized row with integers. Grid: tiles of outputs.

    ``x [2, in]`` has the bytes that `quantize_rows` writes. The result has the same bits as that
    of `multiply_integer_rows`.
    """
    launch_next(PDL)
    outputs = tl.program_id(0) * N + tl.arange(0, N)
    is_output = outputs < out_features
    inputs = tl.arange(0, INPUTS)
    weight_rows = weight + outputs.to(tl.int64)[:, None] * in_features
    mask = is_output[:, None] & (inputs < in_features)[None, :]
    numbers = tl.load(weight_rows + inputs[None, :], mask=mask, other=0, eviction_policy="evict_first")
    factors = tl.load(scales + outputs, mask=is_output, other=0.0)
    wait_for_previous(PDL)
    has_wide = tl.load(has_wide_integers) > 0
    total = tl.zeros([N], tl.int32)
    high_total = tl.zeros([N], tl.int32)
    for begin in range(0, in_features, INPUTS):
        columns = begin + inputs
        is_input = columns < in_features
        if begin > 0:
            mask = is_output[:, None] & is_input[None, :]
            numbers = tl.load(
                weight_rows + columns[None, :], mask=mask, other=0, eviction_policy="evict_first"
            )
        values = tl.load(x + columns, mask=is_input, other=0).to(tl.int32)
        total += tl.sum(numbers.to(tl.int32) * values[None, :], 1)
        if has_wide:
            values = tl.load(x + in_features + columns, mask=is_input, other=0).to(tl.int32)
            high_total += tl.sum(numbers.to(tl.int32) * values[None, :], 1)
    exact = total.to(tl.float64) + 16.0 * high_total.to(tl.float64)
    result = exact.to(tl.float32) * (tl.load(x_scales) * factors)
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + outputs, result.to(out.dtype.element_ty), mask=is_output)


@triton.jit
def multiply_integer_rows(
    out,
    x,
    x_scales,
    has_wide_integers,
    weight,
    weight_addresses,
    scales,
    scale_addresses,
    bias,
    bias_addresses,
    rows,
    group_starts,
    num_rows,
    num_groups,
    num_x_rows,
    out_features,
    in_features,
    M: tl.constexpr,
    N: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GATHERS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Compute one tile of the product of quantized rows with integers that have one scale per output.

    Grid: tiles of rows, tiles of outputs. ``x [2, num_x_rows, in]`` has the bytes that `quantize_rows`
    writes. The sums of integers are exact.
    """
    group, positions, is_row = find_tile_rows(group_starts, num_rows, num_groups, M, GROUPS)
    weight = group_tensor(weight, weight_addresses, group, 0, False, GROUPS)
    x_rows = positions.to(tl.int64)
    if GATHERS:
        x_rows = tl.load(rows + positions, mask=is_row, other=0)
    outputs = tl.program_id(1) * N + tl.arange(0, N)
    is_output = outputs < out_features
    tile_has_wide = tl.max(tl.load(has_wide_integers + x_rows, mask=is_row, other=0), 0) > 0
    total = tl.zeros([M, N], tl.int32)
    high_total = tl.zeros([M, N], tl.int32)
    for start in range(0, in_features, INPUTS):
        inputs = start + tl.arange(0, INPUTS)
        is_input = inputs < in_features
        weight_offsets = outputs.to(tl.int64)[None, :] * in_features + inputs[:, None]
        numbers = tl.load(weight + weight_offsets, mask=is_output[None, :] & is_input[:, None], other=0)
        x_offsets = x_rows[:, None] * in_features + inputs[None, :]
        mask = is_row[:, None] & is_input[None, :]
        total += tl.dot(tl.load(x + x_offsets, mask=mask, other=0), numbers, out_dtype=tl.int32)
        if tile_has_wide:
            x_offsets += (x_rows[:, None] * 0 + num_x_rows) * in_features
            high_total += tl.dot(tl.load(x + x_offsets, mask=mask, other=0), numbers, out_dtype=tl.int32)
    # The two sums are added in float64, so that the result is rounded once.
    exact = total.to(tl.float64) + 16.0 * high_total.to(tl.float64)
    scale = group_tensor(scales, scale_addresses, group, 0, False, GROUPS)
    factors = tl.load(x_scales + x_rows, mask=is_row, other=0.0)[:, None]
    factors = factors * tl.load(scale + outputs, mask=is_output, other=0.0)[None, :]
    result = exact.to(tl.float32) * factors
    if HAS_BIAS:
        pointer = group_tensor(bias, bias_addresses, group, 0, False, GROUPS)
        result += tl.load(pointer + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    offsets = positions.to(tl.int64)[:, None] * out_features + outputs[None, :]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def combine_experts(out, y, topk_weights, y_rows, width, TOP: tl.constexpr, WIDTH: tl.constexpr):
    """Add the weighted outputs of a row's experts. Grid: rows, tiles of WIDTH columns.

    ``y_rows [T, TOP]`` has the rows of ``y`` to add for each row of ``out``, in the order of the expert ids.
    ``topk_weights [T, TOP]`` has the weights of these rows of ``y``.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_column = columns < width
    total = tl.zeros([WIDTH], tl.float32)
    for choice in range(TOP):
        y_row = tl.load(y_rows + row * TOP + choice)
        values = tl.load(y + y_row * width + columns, mask=is_column, other=0.0).to(tl.float32)
        total += values * tl.load(topk_weights + row * TOP + choice)
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=is_column)
