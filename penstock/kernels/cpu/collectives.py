"""Collectives in memory shared by the ranks of one host, and lookups in a split embedding table."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.collectives import Collectives
from penstock.kernels.cpu.convolution import CpuConvolution
from penstock.kernels.cpu.linear import DTYPE_CODES


class CpuCollectives(CpuConvolution):
    """Collectives and lookups with C++ kernels.

    The collectives release the GIL, so that another thread can detect exited ranks.
    """

    def all_reduce(self, x: Tensor, ranks: Collectives) -> Tensor:
        dtype_code, region = DTYPE_CODES.get(x.dtype), ranks.region
        if dtype_code is None or not region or x.dim() != 2 or x.stride(1) != 1:
            return ranks.all_reduce(x)
        out = self._empty(x.shape, x.dtype)
        rows, width = x.shape
        pointers = (x.data_ptr(), x.stride(0), out.data_ptr())
        self._kernels.long_all_reduce(dtype_code, *pointers, rows, width, region, ranks.rank)
        ranks.check()
        return out

    def all_gather(self, x: Tensor, ranks: Collectives, widths: tuple[int, ...]) -> Tensor:
        region, element_bytes = ranks.region, x.element_size()
        if not region or x.stride(1) != 1:
            return ranks.all_gather(x, widths)
        assert x.shape[1] == widths[ranks.rank]
        out = self._empty((x.shape[0], sum(widths)), x.dtype)
        widths_tensor = self._keep_alive(torch.tensor(widths, dtype=torch.int64))
        self._kernels.long_all_gather(
            element_bytes,
            x.data_ptr(),
            x.stride(0) * element_bytes,
            out.data_ptr(),
            x.shape[0],
            widths_tensor.data_ptr(),
            region,
            ranks.rank,
        )
        ranks.check()
        return out

    def embedding_part(self, tokens: Tensor, table: Tensor, first_token_id: int) -> Tensor:
        conditions = {
            f"{tokens.dtype} tokens": tokens.dtype == torch.int64,
            "strided tokens": tokens.is_contiguous(),
            "tables with strided columns": table.stride(1) == 1,
        }
        if not all(conditions.values()):
            self._report_fallback("embedding_part", conditions)
            return super().embedding_part(tokens, table, first_token_id)
        out = self._empty((len(tokens), table.shape[1]), table.dtype)
        element_bytes = table.element_size()
        self._kernels.embedding_part(
            tokens.data_ptr(),
            table.data_ptr(),
            out.data_ptr(),
            len(tokens),
            first_token_id,
            len(table),
            table.shape[1] * element_bytes,
            table.stride(0) * element_bytes,
        )
        return out
