"""Norms, activations, and other elementwise operations with C++ kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.activations import XIELU, Activation
from penstock.kernels.cpu.attention import CpuAttention
from penstock.kernels.cpu.linear import ACTIVATIONS, TYPES
from penstock.kernels.experts import ClampedSwiGLU

_SCALE, _SOFT_CAP, _CLAMP = 5, 6, 7
"""Function numbers of the kernel ``change`` for functions that are not activations."""


class CpuElementwise(CpuAttention):
    """Norms and elementwise operations with C++ kernels, for float32 and bfloat16 activations."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        kind, weight_kind, strides = TYPES.get(x.dtype), TYPES.get(weight.dtype), x.stride()
        if kind is None or weight_kind is None or len(strides) not in (2, 3) or strides[-1] != 1:
            self._fall_back(
                "rms_norm",
                {
                    f"{x.dtype} activations": kind is not None,
                    f"{weight.dtype} weights": weight_kind is not None,
                    "this memory layout": len(strides) in (2, 3) and strides[-1] == 1,
                },
            )
            return super().rms_norm(x, weight, eps)
        out = self._empty(x.shape, x.dtype)
        *outer, inner, width = x.shape
        self._kernels.rms_norm(
            kind,
            weight_kind,
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
        kind, weight_kind = TYPES.get(x.dtype), TYPES.get(weight.dtype)
        strides, residual_strides = x.stride(), residual.stride()
        fits = len(strides) == 2 and strides[1] == residual_strides[1] == 1 and x.dtype == residual.dtype
        if kind is None or weight_kind is None or not fits:
            self._fall_back(
                "add_rms_norm",
                {
                    f"{x.dtype} activations": kind is not None,
                    f"{weight.dtype} weights": weight_kind is not None,
                    "this memory layout or mixed types": fits,
                },
            )
            return super().add_rms_norm(x, residual, weight, eps)
        normed, total = self._empty(x.shape, x.dtype), self._empty(x.shape, x.dtype)
        rows, width = x.shape
        self._kernels.add_rms_norm(
            kind,
            weight_kind,
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
        kind, weight_kind, strides = TYPES.get(x.dtype), TYPES.get(weight.dtype), x.stride()
        weights_fit = weight_kind is not None and bias.dtype == weight.dtype
        weights_fit = weights_fit and weight.is_contiguous() and bias.is_contiguous()
        weights_fit = weights_fit and weight.shape in (x.shape[-1:], x.shape[-2:])
        if kind is None or not weights_fit or len(strides) not in (2, 3) or strides[-1] != 1:
            self._fall_back(
                "layer_norm",
                {
                    f"{x.dtype} activations": kind is not None,
                    f"{weight.dtype} or strided weights": weights_fit,
                    "this memory layout": len(strides) in (2, 3) and strides[-1] == 1,
                },
            )
            return super().layer_norm(x, weight, bias, eps)
        out = self._empty(x.shape, x.dtype)
        *outer, inner, width = x.shape
        self._kernels.layer_norm(
            kind,
            weight_kind,
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
            TYPES[x.dtype],
            TYPES[weight.dtype],
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
        kinds = (TYPES[x.dtype], TYPES[weight.dtype])
        self._kernels.layer_norm_of_sum(*kinds, *pointers, rows, x.stride(0), residual.stride(0), width, eps)
        return out

    def _can_norm_sum(self, name: str, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> bool:
        """Return whether the kernels support the norm of ``x + residual``. Logs the cause if not."""
        strides, residual_strides = x.stride(), residual.stride()
        fits = len(strides) == 2 and strides[1] == residual_strides[1] == 1 and x.dtype == residual.dtype
        weights_fit = weight.dtype in TYPES and bias.dtype == weight.dtype
        weights_fit = weights_fit and weight.is_contiguous() and bias.is_contiguous()
        if x.dtype in TYPES and weights_fit and fits:
            return True
        self._fall_back(
            name,
            {
                f"{x.dtype} activations": x.dtype in TYPES,
                f"{weight.dtype} or strided weights": weights_fit,
                "this memory layout or mixed types": fits,
            },
        )
        return False

    def sequence_means(self, x: Tensor, row_offsets: Tensor) -> Tensor:
        kind, strides, count = TYPES.get(x.dtype), x.stride(), len(row_offsets) - 1
        offsets_fit = row_offsets.dtype == torch.int32 and row_offsets.is_contiguous()
        if kind is None or strides[1] != 1 or not offsets_fit:
            self._fall_back(
                "sequence_means",
                {
                    f"{x.dtype} activations": kind is not None,
                    "this memory layout": strides[1] == 1,
                    f"{row_offsets.dtype} or strided row offsets": offsets_fit,
                },
            )
            return super().sequence_means(x, row_offsets)
        out = self._empty((count, x.shape[1]), torch.float32)
        pointers = (x.data_ptr(), row_offsets.data_ptr(), out.data_ptr())
        self._kernels.sequence_means(kind, *pointers, count, x.shape[1], strides[0])
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        kind, x_strides, y_strides = TYPES.get(x.dtype), x.stride(), y.stride()
        rows_fit = len(x_strides) == 2 and x_strides[1] == 1 and y_strides[-1] == 1
        if kind is None or not rows_fit or x.dtype != y.dtype or x.shape != y.shape:
            self._fall_back(
                "add",
                {
                    f"{x.dtype} activations": kind is not None,
                    "this memory layout": rows_fit,
                    "operands of different types or shapes": x.dtype == y.dtype and x.shape == y.shape,
                },
            )
            return super().add(x, y)
        out = self._empty(x.shape, x.dtype)
        pointers = (x.data_ptr(), y.data_ptr(), out.data_ptr())
        self._kernels.add(kind, *pointers, *x.shape, x_strides[0], y_strides[0])
        return out

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        out = self._change(x, ACTIVATIONS[activation], 0.0)
        if out is None:
            self._fall_back("activation", _elementwise_conditions(x))
            return super().activation(x, activation)
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        out = self._change(x, _SCALE, factor)
        if out is None:
            self._fall_back("scale", _elementwise_conditions(x))
            return super().scale(x, factor)
        return out

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        out = self._change(x, _SOFT_CAP, cap)
        if out is None:
            self._fall_back("soft_cap", _elementwise_conditions(x))
            return super().soft_cap(x, cap)
        return out

    def clamp(self, x: Tensor, limit: float) -> Tensor:
        out = self._change(x, _CLAMP, limit)
        if out is None:
            self._fall_back("clamp", _elementwise_conditions(x))
            return super().clamp(x, limit)
        return out

    def xielu(self, x: Tensor, parameters: XIELU) -> Tensor:
        kind, strides = TYPES.get(x.dtype), x.stride()
        if kind is None or len(strides) != 2 or strides[1] != 1:
            self._fall_back("xielu", _elementwise_conditions(x))
            return super().xielu(x, parameters)
        out = self._empty(x.shape, x.dtype)
        p = parameters
        factors = (p.positive, p.negative, p.slope, p.eps)
        self._kernels.xielu(kind, x.data_ptr(), out.data_ptr(), *x.shape, strides[0], *factors)
        return out

    def _change(self, x: Tensor, function: int, factor: float) -> Tensor | None:
        """Apply a function to each element of ``x [T, F]``.

        Returns None if no kernel supports its type or layout.
        """
        kind, strides = TYPES.get(x.dtype), x.stride()
        if kind is None or len(strides) != 2 or strides[1] != 1:
            return None
        out = self._empty(x.shape, x.dtype)
        self._kernels.change(kind, function, x.data_ptr(), out.data_ptr(), *x.shape, strides[0], factor)
        return out

    def gated_activation(self, x: Tensor, activation: Activation) -> Tensor:
        kind, strides = TYPES.get(x.dtype), x.stride()
        if kind is None or len(strides) != 2 or strides[1] != 1:
            self._fall_back("gated_activation", _elementwise_conditions(x))
            return super().gated_activation(x, activation)
        rows, width = x.shape
        out = self._empty((rows, width // 2), x.dtype)
        self._kernels.gated_activation(
            kind,
            ACTIVATIONS[activation],
            x.data_ptr(),
            out.data_ptr(),
            rows,
            width // 2,
            strides[0],
        )
        return out

    def clamped_swiglu(self, x: Tensor, gate: ClampedSwiGLU) -> Tensor:
        kind, strides = TYPES.get(x.dtype), x.stride()
        if kind is None or len(strides) != 2 or strides[1] != 1:
            self._fall_back("clamped_swiglu", _elementwise_conditions(x))
            return super().clamped_swiglu(x, gate)
        rows, width = x.shape[0], x.shape[1] // 2
        out = self._empty((rows, width), x.dtype)
        pointers = (x.data_ptr(), out.data_ptr())
        self._kernels.clamped_swiglu(kind, *pointers, rows, width, strides[0], gate.alpha, gate.limit)
        return out


def _elementwise_conditions(x: Tensor) -> dict[str, bool]:
    return {
        f"{x.dtype} activations": x.dtype in TYPES,
        "this memory layout": x.dim() == 2 and x.stride(1) == 1,
    }
