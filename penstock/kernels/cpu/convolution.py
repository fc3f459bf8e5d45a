"""Operations of audio codecs with C++ kernels.

Convolutions with one group use the kernel of linear layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.convolution import PackedConv1d, PackedConvTranspose1d
from penstock.kernels.cpu.linear import DTYPE_CODES, LONG_KERNEL_MULTIPLICATIONS
from penstock.kernels.cpu.recurrent import CpuRecurrent
from penstock.kernels.reference.convolution import apply_to_sequences


class CpuConvolution(CpuRecurrent):
    """Convolutions and other operations of audio codecs, for float32 and bfloat16 activations."""

    def conv1d(self, x: Tensor, packed: PackedConv1d, row_offsets: Tensor) -> Tensor:
        supported = {
            f"{x.dtype} activations": x.dtype in DTYPE_CODES,
            "this memory layout": x.dim() == 2 and x.stride(1) == 1,
            f"{packed.groups} groups for {packed.in_channels} channels": packed.weight is None,
        }
        if not all(supported.values()):
            self._report_fallback("conv1d", supported)
        return super().conv1d(x, packed, row_offsets)

    def _conv1d(self, x: Tensor, packed: PackedConv1d) -> Tensor:
        taps, dtype_code = packed.taps, DTYPE_CODES.get(x.dtype)
        rows = packed.output_length(len(x))
        if taps is None or dtype_code is None or x.stride(1) != 1 or not rows:
            return super()._conv1d(x, packed)
        assert x.shape[1] == packed.in_channels, "x and the layer have different numbers of channels"
        assert taps.dtype == torch.float32
        assert taps.is_contiguous()
        bias = packed.bias
        out = self._empty((rows, packed.out_channels), x.dtype)
        is_long = rows * packed.out_channels * packed.kernel_size > LONG_KERNEL_MULTIPLICATIONS
        (self._kernels.long_depthwise_conv1d if is_long else self._kernels.depthwise_conv1d)(
            dtype_code,
            x.data_ptr(),
            taps.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            len(x),
            rows,
            packed.out_channels,
            x.stride(0),
            packed.kernel_size,
            packed.stride,
            packed.dilation,
            packed.padding,
        )
        return out

    def conv_transpose1d(self, x: Tensor, packed: PackedConvTranspose1d, row_offsets: Tensor) -> Tensor:
        if packed.linear is None:
            self._report_fallback("conv_transpose1d", {"groups or dilation": False})
        return super().conv_transpose1d(x, packed, row_offsets)

    def snake(self, x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        dtype_code = DTYPE_CODES.get(x.dtype)
        if dtype_code is None or x.dim() != 2 or x.stride(1) != 1 or not _are_contiguous_float32(alpha, beta):
            self._report_fallback("snake", {f"{x.dtype} activations or this memory layout": False})
            return super().snake(x, alpha, beta)
        out = self._empty(x.shape, x.dtype)
        pointers = (x.data_ptr(), alpha.data_ptr(), beta.data_ptr(), out.data_ptr())
        self._kernels.snake(dtype_code, *pointers, *x.shape, x.stride(0))
        return out

    def add_scaled(self, x: Tensor, y: Tensor, factors: Tensor) -> Tensor:
        dtype_code = DTYPE_CODES.get(x.dtype)
        fits = x.dim() == 2 and x.stride(1) == y.stride(1) == 1 and x.dtype == y.dtype and x.shape == y.shape
        if dtype_code is None or not fits or not _are_contiguous_float32(factors):
            self._report_fallback("add_scaled", {f"{x.dtype} activations or this memory layout": False})
            return super().add_scaled(x, y, factors)
        out = self._empty(x.shape, x.dtype)
        pointers = (x.data_ptr(), y.data_ptr(), factors.data_ptr(), out.data_ptr())
        self._kernels.add_scaled(dtype_code, *pointers, *x.shape, x.stride(0), y.stride(0))
        return out

    def group_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, row_offsets: Tensor
    ) -> Tensor:
        dtype_code = DTYPE_CODES.get(x.dtype)
        if (
            dtype_code is None
            or x.stride(1) != 1
            or x.shape[1] % groups
            or not _are_contiguous_float32(weight, bias)
        ):
            self._report_fallback("group_norm", {f"{x.dtype} activations or this memory layout": False})
            return super().group_norm(x, weight, bias, groups, eps, row_offsets)

        def norm(sequence: Tensor) -> Tensor:
            out = self._empty(sequence.shape, sequence.dtype)
            pointers = (sequence.data_ptr(), weight.data_ptr(), bias.data_ptr(), out.data_ptr())
            self._kernels.group_norm(dtype_code, *pointers, *sequence.shape, groups, sequence.stride(0), eps)
            return out

        return apply_to_sequences(norm, x, row_offsets)

    def polar(self, x: Tensor, limit: float) -> Tensor:
        dtype_code = DTYPE_CODES.get(x.dtype)
        if dtype_code is None or x.dim() != 2 or x.stride(1) != 1:
            self._report_fallback("polar", {f"{x.dtype} activations or this memory layout": False})
            return super().polar(x, limit)
        out = self._empty(x.shape, torch.float32)
        rows, width = x.shape
        self._kernels.polar(dtype_code, x.data_ptr(), out.data_ptr(), rows, width // 2, x.stride(0), limit)
        return out

    def overlap_add(self, frames: Tensor, squares: Tensor, hop: int, row_offsets: Tensor) -> Tensor:
        frame_size = frames.shape[1]
        fits = frames.dtype == torch.float32 and frames.stride(1) == 1 and _are_contiguous_float32(squares)
        if not fits or frame_size % hop:
            self._report_fallback(
                "overlap_add", {f"hops of {hop} in frames of {frame_size}, or this layout": False}
            )
            return super().overlap_add(frames, squares, hop, row_offsets)

        def add(sequence: Tensor) -> Tensor:
            out = self._empty((len(sequence) * hop,), torch.float32)
            pointers = (sequence.data_ptr(), squares.data_ptr(), out.data_ptr())
            self._kernels.overlap_add(*pointers, len(sequence), frame_size, hop, sequence.stride(0))
            return out

        return apply_to_sequences(add, frames, row_offsets)


def _are_contiguous_float32(*tensors: Tensor) -> bool:
    """Return whether all tensors are contiguous float32."""
    return all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)
