"""Functions that several programs share: finding the group of rows of a tile, tanh, and rounding.

A group has the rows of a sequence, of an expert or of an adapter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_tile_group(group_starts, tile, num_groups, ROWS: tl.constexpr):
    """Return the group that owns a tile of at most ROWS rows, and the tile's first row.

    Group g has the rows ``group_starts[g]:group_starts[g + 1]``. Its tiles are numbered from
    ``group_starts[g] // ROWS + g`` on. A group of n rows has at least ``n // ROWS + 1`` tile numbers. With
    this numbering, the host needs only the number of rows and of groups to launch a program. A tile whose
    first row is not in the group is empty.
    """
    group_index = tile * 0
    last_group = group_index + num_groups - 1
    while group_index < last_group:
        middle = (group_index + last_group + 1) // 2
        first_tile = tl.load(group_starts + middle).to(tl.int32) // ROWS + middle
        is_later = first_tile <= tile
        group_index = tl.where(is_later, middle, group_index)
        last_group = tl.where(is_later, last_group, middle - 1)
    start = tl.load(group_starts + group_index).to(tl.int32)
    first_row = start + (tile - (start // ROWS + group_index)) * ROWS
    return group_index, first_row


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent.

    Near 0 it is computed from a series, because the quotient used elsewhere is imprecise there.
    """
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    far = 1 - 2 / (tl.exp(2 * tl.abs(x)) + 1)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -far, far))


@triton.jit
def round_half_even(x):
    """Round numbers with magnitudes below 2**22 to integers, half to even.

    The sum of a number and 1.5 * 2**23 has no fraction bits.
    """
    return (x + 12582912.0) - 12582912.0
