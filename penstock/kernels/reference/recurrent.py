"""The operations of linear attention in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.kernels.inputs import LayerState
from penstock.kernels.recurrent_ops import NORM_EPS, NUM_SAVES, GateFunction, RecurrentOps


class ReferenceRecurrent(RecurrentOps):
    """The operations of linear attention in plain torch, for every device."""

    name = "reference"

    def short_convolution(
        self, x: Tensor, weight: Tensor, state: LayerState, row_offsets: Tensor, lengths: Tensor
    ) -> Tensor:
        out = torch.empty_like(x)
        num_previous = len(weight) - 1
        for slot, first, end, starts_at_zero, saves in _sequences(state, row_offsets, lengths):
            previous = state.inputs[slot]
            previous = torch.zeros_like(previous) if starts_at_zero else previous
            rows = torch.cat([previous, x[first:end]]).float()
            total = torch.zeros_like(rows[num_previous:])
            for tap, factors in enumerate(weight):
                total = total + rows[tap : tap + len(total)] * factors
            out[first:end] = (total / (1 + torch.exp(-total))).to(x.dtype)
            for num_rows, target in [*saves, (end - first, slot)]:
                state.inputs[target] = rows[num_rows : num_rows + num_previous].to(state.inputs.dtype)
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
        key_columns = (qkv.shape[1] - num_heads * value_dim) // 2
        heads_per_key_head = num_heads * key_dim // key_columns
        wide = qkv.float()
        queries, keys, values = (
            wide[:, :key_columns],
            wide[:, key_columns : 2 * key_columns],
            wide[:, 2 * key_columns :],
        )
        q = (
            _normalized(queries.reshape(len(qkv), -1, key_dim)).repeat_interleave(heads_per_key_head, 1)
            * key_dim**-0.5
        )
        k = _normalized(keys.reshape(len(qkv), -1, key_dim))
        k = k.repeat_interleave(heads_per_key_head, 1)  # [T, H, D]
        v = values.reshape(len(qkv), num_heads, value_dim)
        rate_logits, decay_inputs = gates.float().chunk(2, 1)  # [T, H] each
        rates = 1 / (1 + torch.exp(-rate_logits))
        decay_factors = torch.exp(-decay[0] * _softplus(decay_inputs + decay[1]))
        out = torch.empty_like(v)
        for slot, first, end, starts_at_zero, saves in _sequences(state, row_offsets, lengths):
            states = state.recurrent[slot]  # [H, D, F]
            states = torch.zeros_like(states) if starts_at_zero else states
            for row in range(first, end):
                states = states * decay_factors[row, :, None, None]
                change = (v[row] - (k[row, :, :, None] * states).sum(1)) * rates[row, :, None]  # [H, F]
                states = states + k[row, :, :, None] * change[:, None]
                out[row] = (q[row, :, :, None] * states).sum(1)
                for num_rows, target in saves:
                    if num_rows == row + 1 - first:
                        state.recurrent[target] = states
            state.recurrent[slot] = states
        return out.to(qkv.dtype)

    def apply_gate(self, x: Tensor, gate: Tensor, function: GateFunction) -> Tensor:
        wide = gate.float()
        sigmoid = 1 / (1 + torch.exp(-wide))
        return (x.float() * (sigmoid if function == "sigmoid" else wide * sigmoid)).to(x.dtype)


def _sequences(
    state: LayerState, row_offsets: Tensor, lengths: Tensor
) -> Iterator[tuple[int, int, int, bool, list[tuple[int, int]]]]:
    """Yield slot, first row, row after the last, whether the first row is at position 0, and saves.

    The saves are pairs (row count, target slot): the state after that many rows is copied to the target.
    """
    offsets, saves = row_offsets.tolist(), state.saves.view(-1, NUM_SAVES, 2).tolist()
    for slot, length, first, end, pairs in zip(
        state.slots.tolist(), lengths.tolist(), offsets[:-1], offsets[1:], saves, strict=True
    ):
        yield (
            slot,
            first,
            end,
            length == end - first,
            [(count, target) for count, target in pairs if 0 < count <= end - first],
        )


def _normalized(x: Tensor) -> Tensor:  # [T, K, D] float32
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def _softplus(x: Tensor) -> Tensor:
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))
