"""Linear attention in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.cuda.attention import FLOATS
from penstock.kernels.cuda.launch import divide_up, has_contiguous_rows, launch, power_of_two
from penstock.kernels.cuda.programs import recurrent as programs
from penstock.kernels.cuda.rows import CudaRows
from penstock.kernels.inputs import LayerState
from penstock.kernels.recurrent_ops import NORM_EPS, NUM_SAVES, GateFunction

_MAX_KEY_DIM = 256
"""Maximum size of a key head."""
_CHANNELS = 256
"""Maximum number of channels of a tile of the convolution."""
_COLUMNS = 32
"""Maximum number of columns of a state in one program."""


class CudaRecurrent(CudaRows):
    """The operations of linear attention in Triton."""

    def short_convolution(
        self, x: Tensor, weight: Tensor, state: LayerState, row_offsets: Tensor, lengths: Tensor
    ) -> Tensor:
        fits = x.dtype in FLOATS and state.inputs.dtype == x.dtype and has_contiguous_rows(x)
        if not fits or not (weight.is_contiguous() and state.inputs.is_contiguous()):
            return super().short_convolution(x, weight, state, row_offsets, lengths)
        (rows, width), num_taps, sequences = x.shape, len(weight), len(lengths)
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
        tile = min(_CHANNELS, power_of_two(width))
        tiles, offsets = divide_up(width, tile), (row_offsets, lengths)
        launch(
            programs.convolve, (rows, tiles), out, x, weight, state.inputs, state.slots, *offsets, width,
            x.stride(0), sequences, KERNEL=num_taps, WIDTH=tile, SEQUENCES=power_of_two(sequences),
            is_dependent=True,
        )  # fmt: skip
        launch(
            programs.keep_inputs, (sequences, tiles), state.inputs, x, state.slots, state.saves, *offsets,
            width, x.stride(0), HISTORY=num_taps - 1, TAPS=power_of_two(num_taps - 1), WIDTH=tile,
            NUM_SAVES=NUM_SAVES, is_dependent=True,
        )  # fmt: skip
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
        _, heads, key_dim, value_dim = state.recurrent.shape
        fits = qkv.dtype in FLOATS and gates.dtype in FLOATS and has_contiguous_rows(qkv, gates)
        fits = fits and decay.is_contiguous() and state.recurrent.is_contiguous()
        if not fits or key_dim > _MAX_KEY_DIM:
            return super().gated_delta_rule(qkv, gates, decay, state, row_offsets, lengths)
        out = torch.empty((len(qkv), heads, value_dim), dtype=qkv.dtype, device=qkv.device)
        columns = min(_COLUMNS, power_of_two(value_dim))
        launch(
            programs.delta_rule, (len(lengths), heads, divide_up(value_dim, columns)), out, qkv, gates, decay,
            state.recurrent, state.slots, state.saves, row_offsets, lengths, heads,
            (qkv.shape[1] - heads * value_dim) // (2 * key_dim), key_dim, value_dim, qkv.stride(0),
            gates.stride(0), key_dim**-0.5, NORM_EPS, KEYS=power_of_two(key_dim), VALUES=columns,
            NUM_SAVES=NUM_SAVES,
            is_dependent=True, num_warps=4,
        )  # fmt: skip
        return out

    def apply_gate(self, x: Tensor, gate: Tensor, function: GateFunction) -> Tensor:
        if x.dtype not in FLOATS or gate.dtype not in FLOATS or not has_contiguous_rows(x, gate):
            return super().apply_gate(x, gate, function)
        rows, heads, dim = x.shape
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        launch(
            programs.apply_gate, (rows * heads,), out, x, gate, heads, dim, *x.stride()[:2],
            *gate.stride()[:2], WIDTH=power_of_two(dim), IS_SILU=function == "silu", is_dependent=True,
            num_warps=1,
        )  # fmt: skip
        return out
