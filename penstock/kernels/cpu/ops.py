"""`CpuOps`: the operations with C++ kernels.

The reference kernels compute operations whose types or layouts the C++ kernels do not support.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.cpu.collectives import CpuCollectives
from penstock.kernels.cpu.linear import DTYPE_CODES
from penstock.kernels.cpu.routing import CpuRouting
from penstock.kernels.inputs import SamplingInputs

_LONG_SAMPLE_LOGITS = 1 << 20
"""Number of logits above which sampling takes long enough to release the GIL."""


class CpuOps(CpuCollectives, CpuRouting):
    """The operations with C++ kernels, for float32 and bfloat16 activations.

    The result of a row computed by a C++ kernel has the same bits in every batch, at every position in the
    batch, and for every number of threads.

    Args:
        kernels: the kernels of one instruction set.
    """

    @property
    def isa(self) -> str:
        """The instruction set of the kernels."""
        return self._kernels.isa

    @property
    def description(self) -> str:
        return f"{self.name} {self.isa}"

    def embedding(self, tokens: Tensor, table: Tensor) -> Tensor:
        return self.take_rows(table, tokens)

    def rope_rows(self, positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self.take_rows(cos, positions), self.take_rows(sin, positions)

    def put_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        x_strides, values_strides = x.stride(), values.stride()
        rows_fit = rows.dtype == torch.int64 and rows.is_contiguous()
        columns_fit = len(x_strides) == 2 and x_strides[1] == values_strides[1] == 1
        fits = rows_fit and columns_fit and x.dtype == values.dtype
        if not fits:
            self._report_fallback("put_rows", {"this memory layout or mixed types": False})
            return super().put_rows(x, rows, values)
        (num_rows, width), element_bytes = x.shape, x.element_size()
        out = self._empty(x.shape, x.dtype)
        pointers = (x.data_ptr(), values.data_ptr(), rows.data_ptr(), out.data_ptr())
        byte_strides = (x_strides[0] * element_bytes, values_strides[0] * element_bytes)
        sizes = (num_rows, rows.shape[0], width * element_bytes, *byte_strides)
        self._check(self._kernels.put_rows(*pointers, *sizes), rows, num_rows)
        return out

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        strides = x.stride()
        if len(strides) != 2 or strides[1] != 1 or rows.dtype != torch.int64 or not rows.is_contiguous():
            self._report_fallback(
                "take_rows",
                {
                    "this memory layout": len(strides) == 2 and strides[1] == 1,
                    f"{rows.dtype} or strided row numbers": rows.dtype == torch.int64
                    and rows.is_contiguous(),
                },
            )
            return super().take_rows(x, rows)
        (table_rows, width), element_bytes = x.shape, x.element_size()
        out = self._empty((rows.shape[0], width), x.dtype)
        bad_index = self._kernels.take_rows(
            x.data_ptr(),
            rows.data_ptr(),
            out.data_ptr(),
            rows.shape[0],
            table_rows,
            width * element_bytes,
            strides[0] * element_bytes,
        )
        self._check(bad_index, rows, table_rows)
        return out

    def sample(self, logits: Tensor, sampling: SamplingInputs, bitmask: Tensor | None = None) -> Tensor:
        dtype_code, strides = DTYPE_CODES.get(logits.dtype), logits.stride()
        bitmask_fits = bitmask is None or bitmask.is_contiguous()
        if dtype_code is None or strides[1] != 1 or not bitmask_fits or not _has_kernel_types(sampling):
            self._report_fallback(
                "sample",
                {
                    f"{logits.dtype} logits": dtype_code is not None,
                    "rows that are not contiguous": strides[1] == 1,
                    "this bitmask layout": bitmask_fits,
                    "these parameter types": _has_kernel_types(sampling),
                },
            )
            return super().sample(logits, sampling, bitmask)
        rows, vocabulary = logits.shape
        tokens = self._empty((rows,), torch.int64)
        is_long = rows * vocabulary > _LONG_SAMPLE_LOGITS
        (self._kernels.long_sample if is_long else self._kernels.sample)(
            dtype_code,
            logits.data_ptr(),
            strides[0],
            rows,
            vocabulary,
            sampling.temperature.data_ptr(),
            sampling.top_k.data_ptr(),
            sampling.top_p.data_ptr(),
            sampling.min_p.data_ptr(),
            sampling.uniforms.data_ptr(),
            0 if bitmask is None else bitmask.data_ptr(),
            0 if bitmask is None else bitmask.shape[1],
            tokens.data_ptr(),
        )
        return tokens

    def _check(self, bad_index: int, rows: Tensor, table_rows: int) -> None:
        """Raise if a kernel has reported an invalid row number.

        Args:
            bad_index: the result of the kernel: the index of an invalid element of ``rows``, or -1.
            rows: the row numbers.
            table_rows: number of rows of the table.

        Raises:
            IndexError: ``bad_index`` is not -1.
        """
        if bad_index != -1:
            raise IndexError(f"row {int(rows[bad_index])} of a table with {table_rows} rows")


def _has_kernel_types(sampling: SamplingInputs) -> bool:
    """Return whether all tensors are contiguous and have the types that `SamplingInputs` documents."""
    floats = (sampling.temperature, sampling.top_p, sampling.min_p)
    return (
        all(x.dtype == torch.float32 and x.is_contiguous() for x in floats)
        and sampling.top_k.dtype == torch.int64
        and sampling.top_k.is_contiguous()
        and sampling.uniforms.dtype == torch.float64
        and sampling.uniforms.is_contiguous()
    )
