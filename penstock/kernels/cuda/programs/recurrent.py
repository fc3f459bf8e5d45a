"""Programs of linear attention: convolution, gated delta rule, output gate.

The state of a convolution with KERNEL taps has the last HISTORY = KERNEL - 1 inputs of a sequence. ``slots``
has the index of each sequence's state, and ``saves`` the pairs that `StateInputs.saves` describes. The
constants SEQUENCES, PADDED_HISTORY, KEY_DIM and the WIDTH of `apply_gate` are sizes rounded up to a power of
two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.cuda.programs.dependent_launch import launch_next_and_wait


@triton.jit
def _load_input(
    x,
    state_inputs,
    slot,
    first_row,
    index,
    is_new,
    x_row_stride,
    num_channels,
    channels,
    mask,
    HISTORY: tl.constexpr,
):
    """Return the inputs of ``channels`` at an index of a sequence, or at a column of indices.

    A negative index reads the state, or 0 in a new sequence.
    ``first_row`` is the sequence's first row of ``x``, with index 0.
    """
    indices = index + tl.zeros_like(channels)
    is_in_step = mask & (indices >= 0)
    is_in_state = mask & (indices < -is_new * HISTORY)
    new_inputs = tl.load(x + (first_row + indices) * x_row_stride + channels, mask=is_in_step, other=0.0)
    old_inputs = tl.load(
        state_inputs + (slot * HISTORY + HISTORY + indices) * num_channels + channels,
        mask=is_in_state,
        other=0.0,
    )
    return new_inputs.to(tl.float32) + old_inputs.to(tl.float32)


@triton.jit
def convolve(
    out, x, weight, state_inputs, slots, row_offsets, lengths, num_channels, x_row_stride, num_sequences,
    KERNEL: tl.constexpr, WIDTH: tl.constexpr, SEQUENCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute WIDTH channels of one row of a short convolution with SiLU. Grid: rows, tiles of channels."""
    launch_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_channel = channels < num_channels
    sequences = tl.arange(0, SEQUENCES)
    row_ends = tl.load(row_offsets + 1 + sequences, mask=sequences < num_sequences, other=2147483647)
    sequence = tl.sum((row_ends <= row).to(tl.int32), 0)
    first_row = tl.load(row_offsets + sequence).to(tl.int64)
    num_rows = tl.load(row_offsets + sequence + 1).to(tl.int64) - first_row
    is_new = (tl.load(lengths + sequence) == num_rows).to(tl.int32)
    slot = tl.load(slots + sequence)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for tap in tl.static_range(KERNEL):
        factors = tl.load(weight + tap * num_channels + channels, mask=is_channel, other=0.0)
        total += factors * _load_input(
            x, state_inputs, slot, first_row, row - first_row - KERNEL + 1 + tap, is_new, x_row_stride,
            num_channels, channels, is_channel, KERNEL - 1,
        )  # fmt: skip
    result = total / (1 + tl.exp(-total))
    tl.store(out + row * num_channels + channels, result.to(out.dtype.element_ty), mask=is_channel)


@triton.jit
def keep_inputs(
    state_inputs, x, slots, saves, row_offsets, lengths, num_channels, x_row_stride,
    HISTORY: tl.constexpr, PADDED_HISTORY: tl.constexpr, WIDTH: tl.constexpr, NUM_SAVES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write the last HISTORY inputs of a sequence to its state.

    For each pair (n, index) of ``saves``, also write the last HISTORY inputs of the sequence after its first
    n rows of the step to the state at ``index``. Grid: sequences, tiles of WIDTH channels.
    """
    launch_next_and_wait(PDL)
    sequence = tl.program_id(0)
    channels = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    history_rows = tl.arange(0, PADDED_HISTORY).to(tl.int64)[:, None]
    is_element = (channels < num_channels) & (history_rows < HISTORY)
    first_row = tl.load(row_offsets + sequence).to(tl.int64)
    num_rows = tl.load(row_offsets + sequence + 1).to(tl.int64) - first_row
    is_new = (tl.load(lengths + sequence) == num_rows).to(tl.int32)
    slot = tl.load(slots + sequence)
    for save in tl.static_range(NUM_SAVES):
        pair = saves + (sequence * NUM_SAVES + save) * 2
        saved_row_count = tl.load(pair)
        saved = _load_input(
            x,
            state_inputs,
            slot,
            first_row,
            saved_row_count - HISTORY + history_rows,
            is_new,
            x_row_stride,
            num_channels,
            channels,
            is_element,
            HISTORY,
        )
        targets = state_inputs + (tl.load(pair + 1) * HISTORY + history_rows) * num_channels + channels
        tl.store(
            targets,
            saved.to(state_inputs.dtype.element_ty),
            mask=is_element
            & (history_rows * 0 + saved_row_count > 0)
            & (history_rows * 0 + saved_row_count <= num_rows),
        )
    values = _load_input(
        x,
        state_inputs,
        slot,
        first_row,
        num_rows - HISTORY + history_rows,
        is_new,
        x_row_stride,
        num_channels,
        channels,
        is_element,
        HISTORY,
    )
    tl.debug_barrier()  # other threads must have read the old inputs
    targets = state_inputs + (slot * HISTORY + history_rows) * num_channels + channels
    tl.store(targets, values.to(state_inputs.dtype.element_ty), mask=is_element)


@triton.jit
def delta_rule(
    out, qkv, gates, decay, states, slots, saves, row_offsets, lengths, num_heads, num_key_heads, key_dim,
    value_dim, qkv_row_stride, gates_row_stride, scale, eps,
    KEY_DIM: tl.constexpr, COLUMNS: tl.constexpr, NUM_SAVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute COLUMNS columns of all rows of one value head of one sequence.

    Update these columns of the head's state, and also write them to the states of ``saves``. Grid: sequences,
    value heads, tiles of COLUMNS columns.
    """
    launch_next_and_wait(PDL)
    sequence, head = tl.program_id(0), tl.program_id(1)
    first_row, row_end = (
        tl.load(row_offsets + sequence).to(tl.int64),
        tl.load(row_offsets + sequence + 1).to(tl.int64),
    )
    is_new = tl.load(lengths + sequence) == row_end - first_row
    key_dims = tl.arange(0, KEY_DIM)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_column = key_dims < key_dim, columns < value_dim
    is_element = is_key[:, None] & is_column[None, :]
    state_index = tl.load(slots + sequence) * num_heads + head
    state_pointers = states + (state_index * key_dim + key_dims[:, None]) * value_dim + columns[None, :]
    s = tl.load(state_pointers, mask=is_element, other=0.0)
    s = tl.where(is_new, 0.0, s)
    key_head = head // (num_heads // num_key_heads)
    decay_rate, decay_bias = tl.load(decay + head), tl.load(decay + num_heads + head)
    for row in range(first_row, row_end):
        row_pointer = qkv + row * qkv_row_stride
        q = tl.load(row_pointer + key_head * key_dim + key_dims, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(row_pointer + (num_key_heads + key_head) * key_dim + key_dims, mask=is_key, other=0.0).to(
            tl.float32
        )
        v = tl.load(
            row_pointer + 2 * num_key_heads * key_dim + head * value_dim + columns, mask=is_column, other=0.0
        ).to(tl.float32)
        q = q * (scale / tl.sqrt(tl.sum(q * q, 0) + eps))
        k = k * (1 / tl.sqrt(tl.sum(k * k, 0) + eps))
        update_logit = tl.load(gates + row * gates_row_stride + head).to(tl.float32)
        decay_input = tl.load(gates + row * gates_row_stride + num_heads + head).to(tl.float32) + decay_bias
        softplus = tl.where(decay_input > 20, decay_input, tl.log(1 + tl.exp(tl.minimum(decay_input, 20.0))))
        s = s * tl.exp(-decay_rate * softplus)
        change = (v - tl.sum(s * k[:, None], 0)) / (1 + tl.exp(-update_logit))
        s += k[:, None] * change[None, :]
        result = tl.sum(s * q[:, None], 0)
        tl.store(
            out + (row * num_heads + head) * value_dim + columns,
            result.to(out.dtype.element_ty),
            mask=is_column,
        )
        for save in tl.static_range(NUM_SAVES):
            pair = saves + (sequence * NUM_SAVES + save) * 2
            saved_index = tl.load(pair + 1) * num_heads + head
            saved_pointers = (
                states + (saved_index * key_dim + key_dims[:, None]) * value_dim + columns[None, :]
            )
            is_saved = tl.load(pair) + key_dims * 0 == row + 1 - first_row
            tl.store(saved_pointers, s, mask=is_element & is_saved[:, None])
    tl.store(state_pointers, s, mask=is_element)


@triton.jit
def apply_gate(
    out, x, gate, num_heads, head_dim, x_row_stride, x_head_stride, gate_row_stride, gate_head_stride,
    WIDTH: tl.constexpr, IS_SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply one head of one row by the sigmoid or the SiLU of its gates. Grid: rows * heads."""
    launch_next_and_wait(PDL)
    out_row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    is_column = columns < head_dim
    row, head = out_row // num_heads, out_row % num_heads
    x_offsets = row * x_row_stride + head * x_head_stride + columns
    values = tl.load(x + x_offsets, mask=is_column, other=0.0).to(tl.float32)
    gate_offsets = row * gate_row_stride + head * gate_head_stride + columns
    gates = tl.load(gate + gate_offsets, mask=is_column, other=0.0).to(tl.float32)
    factors = 1 / (1 + tl.exp(-gates))
    if IS_SILU:
        factors = gates * factors
    tl.store(out + out_row * head_dim + columns, (values * factors).to(out.dtype.element_ty), mask=is_column)
