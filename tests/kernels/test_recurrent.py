"""Linear attention: back ends agree with the reference; batches and chunks do not change the bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.back_ends import all_back_ends, back_end_params
from torch import Tensor

from penstock.kernels import LayerState, Ops
from penstock.kernels.reference import ReferenceOps

REFERENCE = ReferenceOps()
NUM_STATES = 7
# key heads, value heads, key dim, value dim
SIZES = [(1, 1, 8, 16), (2, 4, 16, 8), (2, 6, 24, 72), (1, 2, 128, 128)]


@pytest.fixture(params=back_end_params(all_back_ends()))
def ops(request: pytest.FixtureRequest) -> Ops:
    return all_back_ends()[request.param]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


class DeltaRuleCase:
    """Random inputs of the convolution and of the delta rule for sequences of given lengths."""

    def __init__(self, lengths: Sequence[int], sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        torch.manual_seed(sum(lengths))
        self.num_key_heads, self.num_heads, self.key_dim, self.value_dim = sizes
        self.num_channels = 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim
        self.dtype = dtype
        self.weight = torch.randn(4, self.num_channels)
        self.decay = torch.stack([torch.rand(self.num_heads) * 2, torch.randn(self.num_heads)])
        self.sequences = [torch.randn(n, self.num_channels + 5).to(dtype)[:, 2:-3] for n in lengths]
        self.gates = [(2 * torch.randn(n, 2 * self.num_heads + 3)).to(dtype)[:, 1:-2] for n in lengths]

    def new_states(self) -> LayerState:
        """Return states filled with 7. New sequences must ignore this content."""
        return LayerState(
            torch.full((NUM_STATES, 3, self.num_channels), 7.0, dtype=self.dtype),
            torch.full((NUM_STATES, self.num_heads, self.key_dim, self.value_dim), 7.0),
            torch.empty(0, dtype=torch.int64),
            torch.empty(0, dtype=torch.int64),
        )

    def run(
        self,
        ops: Ops,
        state: LayerState,
        ranges: Sequence[tuple[int, int, int]],
        slots: Sequence[int],
        saves: Sequence[Sequence[int]] = (),
    ) -> list[Tensor]:
        """Compute the rows (sequence, first, end) of a batch. Return the output of each of its sequences."""
        row_offsets = torch.tensor([0, *(end - first for _, first, end in ranges)]).cumsum(0).int()
        lengths = torch.tensor([end for _, _, end in ranges], dtype=torch.int32)
        pairs = torch.tensor(saves or [[0, 0, 0, 0]] * len(ranges)).flatten()
        batch_state = LayerState(state.inputs, state.recurrent, torch.tensor(slots), pairs)
        x = torch.cat([self.sequences[i][first:end] for i, first, end in ranges])
        gates = torch.cat([self.gates[i][first:end] for i, first, end in ranges])
        qkv = ops.short_convolution(x, self.weight, batch_state, row_offsets, lengths)
        out = ops.gated_delta_rule(qkv, gates, self.decay, batch_state, row_offsets, lengths)
        return list(out.split(row_offsets.diff().tolist()))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_back_ends_agree_with_the_reference(
    ops: Ops, dtype: torch.dtype, sizes: tuple[int, int, int, int]
) -> None:
    case = DeltaRuleCase([1, 9, 2, 30], sizes, dtype)
    actual_state, expected_state = case.new_states(), case.new_states()
    ranges, slots = [(i, 0, len(rows)) for i, rows in enumerate(case.sequences)], [3, 0, 6, 2]
    tolerance = 2e-5 if dtype == torch.float32 else 0.03
    actual = case.run(ops, actual_state, ranges, slots)
    expected = case.run(REFERENCE, expected_state, ranges, slots)
    for actual_rows, expected_rows in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_rows, expected_rows, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(actual_state.inputs, expected_state.inputs, atol=0, rtol=0)
    torch.testing.assert_close(
        actual_state.recurrent, expected_state.recurrent, atol=tolerance, rtol=tolerance
    )
    assert (actual_state.recurrent[[1, 4, 5]] == 7).all(), "other states are unchanged"


@pytest.mark.parametrize("sizes", SIZES[1:3], ids=str)
def test_a_sequence_has_equal_bits_in_any_batch_and_in_chunks(
    ops: Ops, dtype: torch.dtype, sizes: tuple[int, int, int, int]
) -> None:
    case = DeltaRuleCase([21, 5, 13], sizes, dtype)
    (whole,) = case.run(ops, single_state := case.new_states(), [(0, 0, 21)], [4])
    state, rows = case.new_states(), []
    for first, end, other in ((0, 1, (1, 0, 5)), (1, 3, (2, 0, 2)), (3, 20, (2, 2, 13)), (20, 21, (1, 0, 5))):
        batch = case.run(ops, state, [other, (0, first, end)], [other[0], 5])
        rows.append(batch[1])
    assert torch.equal(torch.cat(rows), whole)
    assert torch.equal(state.recurrent[5], single_state.recurrent[4])
    assert torch.equal(state.inputs[5], single_state.inputs[4])


@pytest.mark.parametrize("sizes", SIZES[1:3], ids=str)
def test_a_sequence_continues_from_a_saved_state_with_equal_bits(
    ops: Ops, dtype: torch.dtype, sizes: tuple[int, int, int, int]
) -> None:
    case = DeltaRuleCase([21, 9], sizes, dtype)
    (whole,) = case.run(ops, case.new_states(), [(0, 0, 21)], [4])
    state = case.new_states()
    saves = [
        [2, 5, 16, 6],
        [0, 0, 9, 3],
    ]  # for each sequence, two pairs (number of rows, index of the saved state)
    case.run(ops, state, [(0, 0, 18), (1, 0, 9)], [0, 1], saves)
    for num_rows, index in ((2, 5), (16, 6)):
        (rows,) = case.run(ops, state, [(0, num_rows, 21)], [index])
        assert torch.equal(rows, whole[num_rows:])
    assert torch.equal(state.recurrent[3], state.recurrent[1])
    assert torch.equal(state.inputs[3], state.inputs[1])


def test_the_delta_rule_agrees_with_its_definition_in_float64(ops: Ops) -> None:
    case = DeltaRuleCase([12], (2, 4, 8, 16), torch.float32)
    qkv, gates = case.sequences[0].contiguous(), case.gates[0]
    state = replace(case.new_states(), slots=torch.tensor([1]), saves=torch.zeros(4).long())
    row_offsets, lengths = torch.tensor([0, 12], dtype=torch.int32), torch.tensor([12], dtype=torch.int32)
    actual = ops.gated_delta_rule(qkv, gates, case.decay, state, row_offsets, lengths)
    s = torch.zeros(4, 8, 16, dtype=torch.float64)
    for t in range(12):
        q, k, v = qkv[t].double().split([16, 16, 64])
        q, k = (part.view(2, 8).repeat_interleave(2, 0) for part in (q, k))
        q = q / (q.square().sum(1, keepdim=True) + 1e-6).sqrt() / 8**0.5
        k = k / (k.square().sum(1, keepdim=True) + 1e-6).sqrt()
        update, decay = gates[t].double().view(2, 4)
        rates, biases = case.decay.double()
        s = s * torch.exp(-rates * torch.nn.functional.softplus(decay + biases))[:, None, None]
        change = (v.view(4, 16) - torch.einsum("hd,hdf->hf", k, s)) * update.sigmoid()[:, None]
        s = s + torch.einsum("hd,hf->hdf", k, change)
        expected = torch.einsum("hd,hdf->hf", q, s)
        torch.testing.assert_close(actual[t].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("function", ["sigmoid", "silu"])
def test_gates_agree_with_torch(ops: Ops, dtype: torch.dtype, function: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 3, 40).to(dtype)[:, :, :20]
    gate = torch.randn(9, 6, 20).to(dtype).unflatten(1, (3, 2))[:, :, 1]
    wide = gate.float()
    factors = wide.sigmoid() if function == "sigmoid" else torch.nn.functional.silu(wide)
    actual = ops.apply_gate(x, gate, function)
    expected = (x.float() * factors).to(dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
