"""Reads and writes rows by index. An index outside the tensor accesses no memory."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_index(indices, row, columns):
    """Return the index of a row, repeated for each column, because masks must be tensors."""
    return tl.load(indices + row).to(tl.int64) + columns.to(tl.int64) * 0


@triton.jit
def _row_or_fill(x, index, num_rows, row_stride, columns, is_column, IS_FLOAT: tl.constexpr):
    """Return columns of row ``index`` of ``x``.

    If ``x`` has no such row, returns NaN for floats (``IS_FLOAT``) and 0 for integers.
    """
    is_inside = (index >= 0) & (index < num_rows)
    offsets = tl.where(is_inside, index, 0) * row_stride + columns
    values = tl.load(x + offsets, mask=is_column & is_inside, other=0)
    if IS_FLOAT:
        values = tl.where(is_inside, values.to(tl.float32), float("nan")).to(x.dtype.element_ty)
    return values


@triton.jit
def take_rows(
    out, x, indices, num_rows, row_stride, width, WIDTH: tl.constexpr, IS_FLOAT: tl.constexpr
):  # fmt: skip
    """Copy one row of ``x`` to ``out``. Grid: indices, tiles of WIDTH columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_column = columns < width
    index = _load_index(indices, row, columns)
    values = _row_or_fill(x, index, num_rows, row_stride, columns, is_column, IS_FLOAT)
    tl.store(out + row * width + columns, values, mask=is_column)


@triton.jit
def take_row_pairs(
    outs, x, y, indices, num_rows, x_row_stride, y_row_stride, num_indices, width, WIDTH: tl.constexpr
):  # fmt: skip
    """Copy one row of ``x`` to ``outs[0]`` or of ``y`` to ``outs[1]``. ``x`` and ``y`` contain floats.

    Grid: indices, tiles of WIDTH columns, the two tensors.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_column = columns < width
    index = _load_index(indices, row, columns)
    if tl.program_id(2) == 0:
        values = _row_or_fill(x, index, num_rows, x_row_stride, columns, is_column, True)
        tl.store(outs + row * width + columns, values, mask=is_column)
    else:
        values = _row_or_fill(y, index, num_rows, y_row_stride, columns, is_column, True)
        tl.store(outs + (num_indices + row) * width + columns, values, mask=is_column)


@triton.jit
def put_rows(out, values, indices, num_rows, row_stride, width, WIDTH: tl.constexpr):
    """Copy one row of ``values`` into ``out``, in the type of ``out``. Grid: indices, tiles of WIDTH columns.

    A row whose index is outside ``out`` is not copied.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    index = _load_index(indices, row, columns)
    mask = (columns < width) & (index >= 0) & (index < num_rows)
    numbers = tl.load(values + row * row_stride + columns, mask=mask, other=0)
    tl.store(out + index * width + columns, numbers.to(out.dtype.element_ty), mask=mask)
