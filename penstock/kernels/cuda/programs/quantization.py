"""Quantization of activations, as `penstock.kernels.quantized` defines it."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.cuda.programs.dependent_launch import launch_next_and_wait
from penstock.kernels.cuda.programs.tiles import round_half_even


@triton.jit
def _try_larger_target(values, largest, target, fits, max_extras, MULTIPLE: tl.constexpr):
    """Try 127 * MULTIPLE as the target: the number to which the largest magnitude of a row is scaled.

    With a target above 127, some integers exceed a byte. An integer with a magnitude between ``127 * k + 1``
    and ``127 * (k + 1)`` needs k extra bytes. The target is accepted if the row needs at most ``max_extras``
    extra bytes, and if ``fits`` is true, which means that all smaller targets were accepted.

    Returns:
        The largest accepted target, and whether 127 * MULTIPLE was accepted.
    """
    candidate = 127.0 * MULTIPLE
    integers = tl.abs(round_half_even(values * tl.div_rn(candidate, largest))).to(tl.int32)
    extras = tl.sum(tl.maximum(integers - 1, 0) // 127, 0)
    fits = fits & (extras <= max_extras)
    return tl.where(fits, candidate, target), fits


@triton.jit
def quantize_rows(
    out,
    scales,
    is_wide_row,
    x,
    num_rows,
    in_features,
    row_stride,
    max_extras,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantize one row. Grid: rows.

    An integer is stored in two bytes of ``out [2, T, in]`` int8, as ``out[0] + 16 * out[1]``. ``is_wide_row
    [T]`` int32 is 1 for rows with integers beyond -127..127, else 0. Rows whose flag is 0 have zeros in
    ``out[1]``. A row with a largest magnitude below 1e-30 becomes zeros with scale 0. A row with a NaN or an
    infinity becomes zeros with scale NaN.
    """
    launch_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    is_column = columns < in_features
    values = tl.load(x + row * row_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 0)
    has_nan = tl.sum((values != values).to(tl.int32), 0) > 0
    is_finite = (largest < float("inf")) & (not has_nan)
    fits = is_finite & (largest >= 1e-30)
    is_valid = fits
    divisor = tl.where(fits, largest, 1.0)
    values = tl.where(fits, values, 0.0)
    target = tl.where(fits, 127.0, 127.0)
    target, fits = _try_larger_target(values, divisor, target, fits, max_extras, 1.5)
    target, fits = _try_larger_target(values, divisor, target, fits, max_extras, 2.0)
    target, fits = _try_larger_target(values, divisor, target, fits, max_extras, 3.0)
    target, fits = _try_larger_target(values, divisor, target, fits, max_extras, 4.0)
    target, fits = _try_larger_target(values, divisor, target, fits, max_extras, 6.0)
    target, fits = _try_larger_target(values, divisor, target, fits, max_extras, 8.0)
    target, fits = _try_larger_target(values, divisor, target, fits, max_extras, 12.0)
    target, fits = _try_larger_target(values, divisor, target, fits, max_extras, 16.0)
    integers = round_half_even(values * tl.div_rn(target, divisor)).to(tl.int32)
    scale = tl.where(is_valid, tl.div_rn(largest, target), tl.where(is_finite, 0.0, float("nan")))
    is_wide = tl.max(tl.abs(integers), 0) > 127
    high = tl.where(is_wide, (integers + 8) >> 4, 0)
    offsets = row * in_features + columns
    tl.store(out + offsets, (integers - high * 16).to(tl.int8), mask=is_column)
    tl.store(out + (row * 0 + num_rows) * in_features + offsets, high.to(tl.int8), mask=is_column)
    tl.store(scales + row, scale)
    tl.store(is_wide_row + row, is_wide.to(tl.int32))
