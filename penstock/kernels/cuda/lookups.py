"""Lookups and writes of rows by index. An index outside the table affects only the result of its own row.

torch's lookups assert on the device that each index is inside the tensor. A failed assertion ends the CUDA
context of the process, and with it all requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.cuda.attention import FLOATS, CudaAttention
from penstock.kernels.cuda.launch import divide_up, has_contiguous_rows, launch, power_of_two, row_stride
from penstock.kernels.cuda.programs import lookups as programs

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_MAX_TILE_COLUMNS = 1024
"""Maximum number of columns per tile."""


class CudaLookups(CudaAttention):
    """Lookups and writes of rows of floats and integers. Other types use the torch operations."""

    def embedding(self, tokens: Tensor, table: Tensor) -> Tensor:
        return self.take_rows(table, tokens.flatten()).view(*tokens.shape, *table.shape[1:])

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        if x.dtype not in (*FLOATS, *_INTEGERS):
            return super().take_rows(x, rows)
        flat = _as_matrix(x)
        width = flat.shape[1]
        out = torch.empty((len(rows), *x.shape[1:]), dtype=x.dtype, device=x.device)
        launch(
            programs.take_rows, (len(rows), divide_up(width, _MAX_TILE_COLUMNS)), out, flat,
            _move_indices(x, rows), len(x), row_stride(flat), width, WIDTH=_tile_columns(width),
            IS_FLOAT=x.dtype in FLOATS,
        )  # fmt: skip
        return out

    def put_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        if any(tensor.dtype not in (*FLOATS, *_INTEGERS) for tensor in (x, values)):
            return super().put_rows(x, rows, values)
        out = x.clone(memory_format=torch.contiguous_format)
        flat = _as_matrix(values)
        width = flat.shape[1]
        launch(
            programs.put_rows, (len(rows), divide_up(width, _MAX_TILE_COLUMNS)), out, flat,
            _move_indices(x, rows), len(x), row_stride(flat), width, WIDTH=_tile_columns(width),
        )  # fmt: skip
        return out

    def rope_rows(self, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        width = cos.shape[1]
        if cos.dtype not in FLOATS or cos.dtype != sin.dtype or not has_contiguous_rows(cos, sin):
            return super().rope_rows(positions, cos, sin)
        outs = torch.empty((2, len(positions), width), dtype=cos.dtype, device=cos.device)
        launch(
            programs.take_row_pairs, (len(positions), divide_up(width, _MAX_TILE_COLUMNS), 2), outs, cos, sin,
            _move_indices(cos, positions), len(cos), row_stride(cos), row_stride(sin), len(positions), width,
            WIDTH=_tile_columns(width),
        )  # fmt: skip
        return outs[0], outs[1]


def _as_matrix(x: Tensor) -> Tensor:
    """Return x as a matrix ``[T, F]`` with contiguous rows, without a copy if possible."""
    flat = x.flatten(1) if x.dim() > 1 else x[:, None]
    return flat if has_contiguous_rows(flat) else flat.contiguous()


def _move_indices(x: Tensor, indices: Tensor) -> Tensor:
    """Return the indices as a contiguous tensor on the device of x."""
    return indices.to(x.device).contiguous()


def _tile_columns(width: int) -> int:
    return min(_MAX_TILE_COLUMNS, power_of_two(width))
