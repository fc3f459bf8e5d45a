"""Linear attention with C++ kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.cpu.elementwise import CpuElementwise
from penstock.kernels.cpu.linear import DTYPE_CODES, LONG_KERNEL_MULTIPLICATIONS
from penstock.kernels.inputs import LayerState
from penstock.kernels.recurrent_ops import GateFunction

_MAX_WIDTH = 8
"""Maximum width of the convolution; ``MAX_WIDTH`` in csrc."""
_MAX_KEY_DIM = 256
"""Maximum size of a key head; ``MAX_KEY_DIM`` in csrc."""

_GATE_CODES: dict[GateFunction, int] = {"sigmoid": 0, "silu": 1}
"""Codes of the gate functions in csrc/recurrent.inl."""


class CpuRecurrent(CpuElementwise):
    """Linear attention with C++ kernels, for float32 and bfloat16 activations."""

    def short_convolution(
        self, x: Tensor, weight: Tensor, state: LayerState, row_offsets: Tensor, lengths: Tensor
    ) -> Tensor:
        dtype_code, width = DTYPE_CODES.get(x.dtype), len(weight)
        types_fit = state.inputs.dtype == x.dtype and weight.dtype == torch.float32
        layout_fits = x.stride(1) == 1 and weight.is_contiguous() and state.inputs.is_contiguous()
        if dtype_code is None or not types_fit or not layout_fits or not 2 <= width <= _MAX_WIDTH:
            self._report_fallback(
                "short_convolution",
                {
                    f"{x.dtype} activations": dtype_code is not None,
                    "states or weights of another type": types_fit,
                    "this memory layout": layout_fits,
                    f"a width of {width} (2 to {_MAX_WIDTH})": 2 <= width <= _MAX_WIDTH,
                },
            )
            return super().short_convolution(x, weight, state, row_offsets, lengths)
        out = self._empty(x.shape, x.dtype)
        self._kernels.short_convolution(
            dtype_code,
            x.data_ptr(),
            weight.data_ptr(),
            state.inputs.data_ptr(),
            *_sequence_addresses(state, row_offsets, lengths),
            out.data_ptr(),
            len(lengths),
            x.shape[1],
            width,
            x.stride(0),
        )
        return out

    def gated_delta_rule(
        self,
        qkv: Tensor,
        gates: Tensor,
        decay: Tensor,
        state: LayerState,
        row_offsets: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        dtype_code = DTYPE_CODES.get(qkv.dtype)
        _, heads, key_dim, value_dim = state.recurrent.shape
        types_fit = gates.dtype == qkv.dtype and decay.dtype == state.recurrent.dtype == torch.float32
        layout_fits = qkv.stride(1) == gates.stride(1) == 1
        layout_fits = layout_fits and decay.is_contiguous() and state.recurrent.is_contiguous()
        if dtype_code is None or not types_fit or not layout_fits or key_dim > _MAX_KEY_DIM:
            self._report_fallback(
                "gated_delta_rule",
                {
                    f"{qkv.dtype} activations": dtype_code is not None,
                    "gates, decay or states of another type": types_fit,
                    "this memory layout": layout_fits,
                    f"a key head size of {key_dim} (at most {_MAX_KEY_DIM})": key_dim <= _MAX_KEY_DIM,
                },
            )
            return super().gated_delta_rule(qkv, gates, decay, state, row_offsets, lengths)
        rows = len(qkv)
        out = self._empty((rows, heads, value_dim), qkv.dtype)
        is_long = 4 * rows * heads * key_dim * value_dim > LONG_KERNEL_MULTIPLICATIONS
        (self._kernels.long_gated_delta_rule if is_long else self._kernels.gated_delta_rule)(
            dtype_code,
            qkv.data_ptr(),
            gates.data_ptr(),
            decay.data_ptr(),
            state.recurrent.data_ptr(),
            *_sequence_addresses(state, row_offsets, lengths),
            out.data_ptr(),
            len(lengths),
            heads,
            (qkv.shape[1] - heads * value_dim) // (2 * key_dim),
            key_dim,
            value_dim,
            rows,
            qkv.stride(0),
            gates.stride(0),
        )
        return out

    def apply_gate(self, x: Tensor, gate: Tensor, function: GateFunction) -> Tensor:
        dtype_code = DTYPE_CODES.get(x.dtype)
        layout_fits = x.dim() == 3 and x.stride(2) == gate.stride(2) == 1 and x.dtype == gate.dtype
        if dtype_code is None or not layout_fits:
            self._report_fallback(
                "apply_gate",
                {
                    f"{x.dtype} activations": dtype_code is not None,
                    "this memory layout or mixed types": layout_fits,
                },
            )
            return super().apply_gate(x, gate, function)
        out = self._empty(x.shape, x.dtype)
        pointers = (x.data_ptr(), gate.data_ptr(), out.data_ptr())
        self._kernels.apply_gate(
            dtype_code, _GATE_CODES[function], *pointers, *x.shape, *x.stride()[:2], *gate.stride()[:2]
        )
        return out


def _sequence_addresses(state: LayerState, row_offsets: Tensor, lengths: Tensor) -> tuple[int, ...]:
    """Return the addresses of slots, saves, row offsets and lengths of the sequences of a step."""
    assert state.slots.dtype == state.saves.dtype == torch.int64
    assert state.saves.is_contiguous()
    assert row_offsets.dtype == lengths.dtype == torch.int32
    assert state.slots.is_contiguous()
    assert row_offsets.is_contiguous()
    assert lengths.is_contiguous()
    tensors = (state.slots, state.saves, row_offsets, lengths)
    return tuple(tensor.data_ptr() for tensor in tensors)
