"""Norms, activations, and other elementwise operations with C++ kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.activations import XIELU, Activation
from penstock.kernels.cpu.attention import CpuAttention
from penstock.kernels.cpu.library import Kernel
from penstock.kernels.cpu.linear import ACTIVATION_CODES, DTYPE_CODES
from penstock.kernels.experts import ClampedSwiGLU

_SCALE, _SOFT_CAP, _CLAMP = 5, 6, 7
"""Function codes of the kernel ``apply_function`` for functions besides activations."""


class CpuElementwise(CpuAttention):
    """Norms and elementwise operations with C++ kernels, for float32 and bfloat16 activations."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype_code, weight_dtype_code, strides = (
            DTYPE_CODES.get(x.dtype),
            DTYPE_CODES.get(weight.dtype),
            x.stride(),
        )
        if dtype_code is None or weight_dtype_code is None or len(strides) not in (2, 3) or strides[-1] != 1:
            self._report_fallback(
                "rms_norm",
                {
                    f"{x.dtype} activations": dtype_code is not None,
                    f"{weight.dtype} weights": weight_dtype_code is not None,
                    "this memory layout": len(strides) in (2, 3) and strides[-1] == 1,
                },
            )
            return super().rms_norm(x, weight, eps)
        out = self._empty(x.shape, x.dtype)
        *outer, inner, width = x.shape
        self._kernels.rms_norm(
            dtype_code,
            weight_dtype_code,
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            outer[0] if outer else 1,
            inner,
            strides[0],
            strides[-2],
            width,
            eps,
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        dtype_code, weight_dtype_code = DTYPE_CODES.get(x.dtype), DTYPE_CODES.get(weight.dtype)
        strides, residual_strides = x.stride(), residual.stride()
        fits = len(strides) == 2 and strides[1] == residual_strides[1] == 1 and x.dtype == residual.dtype
        if dtype_code is None or weight_dtype_code is None or not fits:
            self._report_fallback(
                "add_rms_norm",
                {
                    f"{x.dtype} activations": dtype_code is not None,
                    f"{weight.dtype} weights": weight_dtype_code is not None,
                    "this memory layout or mixed types": fits,
                },
            )
            return super().add_rms_norm(x, residual, weight, eps)
        normed, total = self._empty(x.shape, x.dtype), self._empty(x.shape, x.dtype)
        rows, width = x.shape
        self._kernels.add_rms_norm(
            dtype_code,
            weight_dtype_code,
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            normed.data_ptr(),
            total.data_ptr(),
            rows,
            strides[0],
            residual_strides[0],
            width,
            eps,
        )
        return normed, total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        dtype_code, weight_dtype_code, strides = (
            DTYPE_CODES.get(x.dtype),
            DTYPE_CODES.get(weight.dtype),
            x.stride(),
        )
        weights_fit = weight_dtype_code is not None and bias.dtype == weight.dtype
        weights_fit = weights_fit and weight.is_contiguous() and bias.is_contiguous()
        weights_fit = weights_fit and weight.shape in (x.shape[-1:], x.shape[-2:])
        if dtype_code is None or not weights_fit or len(strides) not in (2, 3) or strides[-1] != 1:
            self._report_fallback(
                "layer_norm",
                {
                    f"{x.dtype} activations": dtype_code is not None,
                    f"{weight.dtype} or strided weights": weights_fit,
                    "this memory layout": len(strides) in (2, 3) and strides[-1] == 1,
                },
            )
            return super().layer_norm(x, weight, bias, eps)
        out = self._empty(x.shape, x.dtype)
        *outer, inner, width = x.shape
        self._kernels.layer_norm(
            dtype_code,
            weight_dtype_code,
            x.data_ptr(),
            weight.data_ptr(),
            bias.data_ptr(),
            out.data_ptr(),
            outer[0] if outer else 1,
            inner,
            strides[0],
            strides[-2],
            width,
            width if weight.dim() == 2 else 0,
            eps,
        )
        return out

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if not self._can_norm_sum("add_layer_norm", x, residual, weight, bias):
            return super().add_layer_norm(x, residual, weight, bias, eps)
        normed, total = self._empty(x.shape, x.dtype), self._empty(x.shape, x.dtype)
        rows, width = x.shape
        self._kernels.add_layer_norm(
            DTYPE_CODES[x.dtype],
            DTYPE_CODES[weight.dtype],
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            bias.data_ptr(),
            normed.data_ptr(),
            total.data_ptr(),
            rows,
            x.stride(0),
            residual.stride(0),
            width,
            eps,
        )
        return normed, total

    def layer_norm_of_sum(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        if not self._can_norm_sum("layer_norm_of_sum", x, residual, weight, bias):
            return super().layer_norm_of_sum(x, residual, weight, bias, eps)
        out = self._empty(x.shape, x.dtype)
        rows, width = x.shape
        pointers = (x.data_ptr(), residual.data_ptr(), weight.data_ptr(), bias.data_ptr(), out.data_ptr())
        dtype_codes = (DTYPE_CODES[x.dtype], DTYPE_CODES[weight.dtype])
        self._kernels.layer_norm_of_sum(
            *dtype_codes, *pointers, rows, x.stride(0), residual.stride(0), width, eps
        )
        return out

    def _can_norm_sum(self, name: str, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> bool:
        """Return whether the C++ kernel supports the norm of ``x + residual``.

        If not, log why (`_report_fallback`).
        """
        strides, residual_strides = x.stride(), residual.stride()
        fits = len(strides) == 2 and strides[1] == residual_strides[1] == 1 and x.dtype == residual.dtype
        weights_fit = weight.dtype in DTYPE_CODES and bias.dtype == weight.dtype
        weights_fit = weights_fit and weight.is_contiguous() and bias.is_contiguous()
        if x.dtype in DTYPE_CODES and weights_fit and fits:
            return True
        self._report_fallback(
            name,
            {
                f"{x.dtype} activations": x.dtype in DTYPE_CODES,
                f"{weight.dtype} or strided weights": weights_fit,
                "this memory layout or mixed types": fits,
            },
        )
        return False

    def sequence_means(self, x: Tensor, row_offsets: Tensor) -> Tensor:
        dtype_code, strides, num_sequences = DTYPE_CODES.get(x.dtype), x.stride(), len(row_offsets) - 1
        offsets_fit = row_offsets.dtype == torch.int32 and row_offsets.is_contiguous()
        if dtype_code is None or strides[1] != 1 or not offsets_fit:
            self._report_fallback(
                "sequence_means",
                {
                    f"{x.dtype} activations": dtype_code is not None,
                    "this memory layout": strides[1] == 1,
                    f"{row_offsets.dtype} or strided row offsets": offsets_fit,
                },
            )
            return super().sequence_means(x, row_offsets)
        out = self._empty((num_sequences, x.shape[1]), torch.float32)
        pointers = (x.data_ptr(), row_offsets.data_ptr(), out.data_ptr())
        self._kernels.sequence_means(dtype_code, *pointers, num_sequences, x.shape[1], strides[0])
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        out = self._combine("add", self._kernels.add, x, y)
        return super().add(x, y) if out is None else out

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        out = self._combine("multiply", self._kernels.multiply, x, y)
        return super().multiply(x, y) if out is None else out

    def _combine(self, name: str, kernel: Kernel, x: Tensor, y: Tensor) -> Tensor | None:
        """Return the result of a kernel with two operands; None if it does not support the operands."""
        dtype_code, x_strides, y_strides = DTYPE_CODES.get(x.dtype), x.stride(), y.stride()
        rows_fit = len(x_strides) == 2 and x_strides[1] == 1 and y_strides[-1] == 1
        if dtype_code is None or not rows_fit or x.dtype != y.dtype or x.shape != y.shape:
            self._report_fallback(
                name,
                {
                    f"{x.dtype} activations": dtype_code is not None,
                    "this memory layout": rows_fit,
                    "operands of different types or shapes": x.dtype == y.dtype and x.shape == y.shape,
                },
            )
            return None
        out = self._empty(x.shape, x.dtype)
        pointers = (x.data_ptr(), y.data_ptr(), out.data_ptr())
        kernel(dtype_code, *pointers, *x.shape, x_strides[0], y_strides[0])
        return out

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        out = self._apply_function(x, ACTIVATION_CODES[activation], 0.0)
        if out is None:
            self._report_fallback("activation", _elementwise_conditions(x))
            return super().activation(x, activation)
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        out = self._apply_function(x, _SCALE, factor)
        if out is None:
            self._report_fallback("scale", _elementwise_conditions(x))
            return super().scale(x, factor)
        return out

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        out = self._apply_function(x, _SOFT_CAP, cap)
        if out is None:
            self._report_fallback("soft_cap", _elementwise_conditions(x))
            return super().soft_cap(x, cap)
        return out

    def clamp(self, x: Tensor, low: float, high: float) -> Tensor:
        out = self._apply_function(x, _CLAMP, high, low)
        if out is None:
            self._report_fallback("clamp", _elementwise_conditions(x))
            return super().clamp(x, low, high)
        return out

    def xielu(self, x: Tensor, parameters: XIELU) -> Tensor:
        dtype_code, strides = DTYPE_CODES.get(x.dtype), x.stride()
        if dtype_code is None or len(strides) != 2 or strides[1] != 1:
            self._report_fallback("xielu", _elementwise_conditions(x))
            return super().xielu(x, parameters)
        out = self._empty(x.shape, x.dtype)
        numbers = (parameters.positive, parameters.negative, parameters.slope, parameters.eps)
        self._kernels.xielu(dtype_code, x.data_ptr(), out.data_ptr(), *x.shape, strides[0], *numbers)
        return out

    def _apply_function(self, x: Tensor, function: int, factor: float, low: float = 0.0) -> Tensor | None:
        """Return the result of a function for each element of ``x [T, F]``.

        Returns None if the kernel does not support the type or layout of x.

        Args:
            x: the elements.
            function: one of `ACTIVATION_CODES`, `_SCALE`, `_SOFT_CAP` or `_CLAMP`.
            factor: the parameter of the function; for `_CLAMP` the upper bound. Activations ignore it.
            low: the lower bound of `_CLAMP`.
        """
        dtype_code, strides = DTYPE_CODES.get(x.dtype), x.stride()
        if dtype_code is None or len(strides) != 2 or strides[1] != 1:
            return None
        out = self._empty(x.shape, x.dtype)
        pointers = (x.data_ptr(), out.data_ptr())
        self._kernels.apply_function(dtype_code, function, *pointers, *x.shape, strides[0], factor, low)
        return out

    def gated_activation(self, x: Tensor, activation: Activation) -> Tensor:
        dtype_code, strides = DTYPE_CODES.get(x.dtype), x.stride()
        if dtype_code is None or len(strides) != 2 or strides[1] != 1:
            self._report_fallback("gated_activation", _elementwise_conditions(x))
            return super().gated_activation(x, activation)
        rows, width = x.shape
        out = self._empty((rows, width // 2), x.dtype)
        self._kernels.gated_activation(
            dtype_code,
            ACTIVATION_CODES[activation],
            x.data_ptr(),
            out.data_ptr(),
            rows,
            width // 2,
            strides[0],
        )
        return out

    def clamped_swiglu(self, x: Tensor, gate: ClampedSwiGLU) -> Tensor:
        dtype_code, strides = DTYPE_CODES.get(x.dtype), x.stride()
        if dtype_code is None or len(strides) != 2 or strides[1] != 1:
            self._report_fallback("clamped_swiglu", _elementwise_conditions(x))
            return super().clamped_swiglu(x, gate)
        rows, width = x.shape[0], x.shape[1] // 2
        out = self._empty((rows, width), x.dtype)
        pointers = (x.data_ptr(), out.data_ptr())
        self._kernels.clamped_swiglu(dtype_code, *pointers, rows, width, strides[0], gate.alpha, gate.limit)
        return out


def _elementwise_conditions(x: Tensor) -> dict[str, bool]:
    """Return the conditions of `_report_fallback` for kernels that read ``x [T, F]``."""
    return {
        f"{x.dtype} activations": x.dtype in DTYPE_CODES,
        "this memory layout": x.dim() == 2 and x.stride(1) == 1,
    }
