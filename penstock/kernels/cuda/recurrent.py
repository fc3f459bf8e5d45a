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
"""Maximum number of dimensions of a key head in the program `delta_rule`."""
_MAX_TILE_CHANNELS = 256
"""Maximum number of channels of a tile of the convolution."""
_MAX_TILE_COLUMNS = 32
"""Maximum number of columns of a state that one program `delta_rule` updates."""


class CudaRecurrent(CudaRows):
    """The operations of linear attention in Triton."""

    def short_convolution(
        self, x: Tensor, weight: Tensor, state: LayerState, row_offsets: Tensor, lengths: Tensor
    ) -> Tensor:
        is_supported = x.dtype in FLOATS and state.inputs.dtype == x.dtype and has_contiguous_rows(x)
        if not is_supported or not (weight.is_contiguous() and state.inputs.is_contiguous()):
            return super().short_convolution(x, weight, state, row_offsets, lengths)
        (num_rows, num_channels), num_taps, num_sequences = x.shape, len(weight), len(lengths)
        out = torch.empty((num_rows, num_channels), dtype=x.dtype, device=x.device)
        tile_channels = min(_MAX_TILE_CHANNELS, power_of_two(num_channels))
        num_tiles, sequence_arguments = divide_up(num_channels, tile_channels), (row_offsets, lengths)
        launch(
            programs.convolve, (num_rows, num_tiles), out, x, weight, state.inputs, state.slots,
            *sequence_arguments, num_channels, x.stride(0), num_sequences, KERNEL=num_taps,
            WIDTH=tile_channels, SEQUENCES=power_of_two(num_sequences), is_dependent=True,
        )  # fmt: skip
        launch(
            programs.keep_inputs, (num_sequences, num_tiles), state.inputs, x, state.slots, state.saves,
            *sequence_arguments, num_channels, x.stride(0), HISTORY=num_taps - 1,
            PADDED_HISTORY=power_of_two(num_taps - 1), WIDTH=tile_channels, NUM_SAVES=NUM_SAVES,
            is_dependent=True,
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
        _, num_heads, key_dim, value_dim = state.recurrent.shape
        is_supported = qkv.dtype in FLOATS and gates.dtype in FLOATS and has_contiguous_rows(qkv, gates)
        is_supported = is_supported and decay.is_contiguous() and state.recurrent.is_contiguous()
        if not is_supported or key_dim > _MAX_KEY_DIM:
            return super().gated_delta_rule(qkv, gates, decay, state, row_offsets, lengths)
        out = torch.empty((len(qkv), num_heads, value_dim), dtype=qkv.dtype, device=qkv.device)
        tile_columns = min(_MAX_TILE_COLUMNS, power_of_two(value_dim))
        launch(
            programs.delta_rule, (len(lengths), num_heads, divide_up(value_dim, tile_columns)), out, qkv,
            gates, decay, state.recurrent, state.slots, state.saves, row_offsets, lengths, num_heads,
            (qkv.shape[1] - num_heads * value_dim) // (2 * key_dim), key_dim, value_dim, qkv.stride(0),
            gates.stride(0), key_dim**-0.5, NORM_EPS, KEY_DIM=power_of_two(key_dim), COLUMNS=tile_columns,
            NUM_SAVES=NUM_SAVES,
            is_dependent=True, num_warps=4,
        )  # fmt: skip
        return out

    def apply_gate(self, x: Tensor, gate: Tensor, function: GateFunction) -> Tensor:
        if x.dtype not in FLOATS or gate.dtype not in FLOATS or not has_contiguous_rows(x, gate):
            return super().apply_gate(x, gate, function)
        num_rows, num_heads, head_dim = x.shape
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        launch(
            programs.apply_gate, (num_rows * num_heads,), out, x, gate, num_heads, head_dim, *x.stride()[:2],
            *gate.stride()[:2], WIDTH=power_of_two(head_dim), IS_SILU=function == "silu", is_dependent=True,
            num_warps=1,
        )  # fmt: skip
        return out
