"""Programs of linear attention: convolution, gated delta rule, output gate.

The state of a convolution with KERNEL taps has the last HISTORY = KERNEL - 1 inputs of a sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.cuda.programs.dependent_launch import launch_next_and_wait


@triton.jit
def _load_input(
    x, inputs, slot, first, index, is_new, stride, width, channels, is_channel, HISTORY: tl.constexpr
):
    """Load the input at ``index`` of a sequence. A negative index reads the state, or 0 in a new sequence."""
    indices = index + tl.zeros_like(channels)
    is_row = is_channel & (indices >= 0)
    is_old = is_channel & (indices < -is_new * HISTORY)
    row = tl.load(x + (first + indices) * stride + channels, mask=is_row, other=0.0)
    old = tl.load(inputs + (slot * HISTORY + HISTORY + indices) * width + channels, mask=is_old, other=0.0)
    return row.to(tl.float32) + old.to(tl.float32)


@triton.jit
def convolve(
    out, x, weight, inputs, slots, row_offsets, lengths, width, stride, num_sequences,
    KERNEL: tl.constexpr, WIDTH: tl.constexpr, SEQUENCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one row of a short convolution with SiLU. Grid: rows, tiles of WIDTH channels."""
    launch_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_channel = channels < width
    sequences = tl.arange(0, SEQUENCES)
    ends = tl.load(row_offsets + 1 + sequences, mask=sequences < num_sequences, other=2147483647)
    sequence = tl.sum((ends <= row).to(tl.int32), 0)
    first = tl.load(row_offsets + sequence).to(tl.int64)
    count = tl.load(row_offsets + sequence + 1).to(tl.int64) - first
    is_new = (tl.load(lengths + sequence) == count).to(tl.int32)
    slot = tl.load(slots + sequence)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for tap in tl.static_range(KERNEL):
        factors = tl.load(weight + tap * width + channels, mask=is_channel, other=0.0)
        total += factors * _load_input(
            x, inputs, slot, first, row - first - KERNEL + 1 + tap, is_new, stride, width, channels,
            is_channel, KERNEL - 1,
        )  # fmt: skip
    result = total / (1 + tl.exp(-total))
    tl.store(out + row * width + channels, result.to(out.dtype.element_ty), mask=is_channel)


@triton.jit
def keep_inputs(
    inputs, x, slots, saves, row_offsets, lengths, width, stride,
    HISTORY: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr, NUM_SAVES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write the last HISTORY inputs of a sequence to its state.

    For each save, write also the last HISTORY inputs up to the saved row to the state of the save. Grid:
    sequences, tiles of WIDTH channels.
    """
    launch_next_and_wait(PDL)
    sequence = tl.program_id(0)
    channels = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    taps = tl.arange(0, TAPS).to(tl.int64)[:, None]
    is_element = (channels < width) & (taps < HISTORY)
    first = tl.load(row_offsets + sequence).to(tl.int64)
    count = tl.load(row_offsets + sequence + 1).to(tl.int64) - first
    is_new = (tl.load(lengths + sequence) == count).to(tl.int32)
    slot = tl.load(slots + sequence)
    for save in tl.static_range(NUM_SAVES):
        pair = saves + (sequence * NUM_SAVES + save) * 2
        num_rows = tl.load(pair)
        saved = _load_input(
            x,
            inputs,
            slot,
            first,
            num_rows - HISTORY + taps,
            is_new,
            stride,
            width,
            channels,
            is_element,
            HISTORY,
        )
        targets = inputs + (tl.load(pair + 1) * HISTORY + taps) * width + channels
        tl.store(
            targets,
            saved.to(inputs.dtype.element_ty),
            mask=is_element & (taps * 0 + num_rows > 0) & (taps * 0 + num_rows <= count),
        )
    values = _load_input(
        x, inputs, slot, first, count - HISTORY + taps, is_new, stride, width, channels, is_element, HISTORY
    )
    tl.debug_barrier()  # other threads must have read the old inputs
    targets = inputs + (slot * HISTORY + taps) * width + channels
    tl.store(targets, values.to(inputs.dtype.element_ty), mask=is_element)


@triton.jit
def delta_rule(
    out, qkv, gates, decay, states, slots, saves, row_offsets, lengths, heads, key_heads, key_dim, value_dim,
    qkv_stride, gates_stride, scale, eps,
    KEYS: tl.constexpr, VALUES: tl.constexpr, NUM_SAVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute all rows of one head of one sequence, and update its state.

    Grid: sequences, heads, tiles of VALUES columns.
    """
    launch_next_and_wait(PDL)
    sequence, head = tl.program_id(0), tl.program_id(1)
    first, end = (
        tl.load(row_offsets + sequence).to(tl.int64),
        tl.load(row_offsets + sequence + 1).to(tl.int64),
    )
    is_new = tl.load(lengths + sequence) == end - first
    keys = tl.arange(0, KEYS)
    columns = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_column = keys < key_dim, columns < value_dim
    is_element = is_key[:, None] & is_column[None, :]
    state = tl.load(slots + sequence) * heads + head
    addresses = states + (state * key_dim + keys[:, None]) * value_dim + columns[None, :]
    s = tl.load(addresses, mask=is_element, other=0.0)
    s = tl.where(is_new, 0.0, s)
    key_head = head // (heads // key_heads)
    decay_rate, bias = tl.load(decay + head), tl.load(decay + heads + head)
    for row in range(first, end):
        start = qkv + row * qkv_stride
        q = tl.load(start + key_head * key_dim + keys, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(start + (key_heads + key_head) * key_dim + keys, mask=is_key, other=0.0).to(tl.float32)
        v = tl.load(
            start + 2 * key_heads * key_dim + head * value_dim + columns, mask=is_column, other=0.0
        ).to(tl.float32)
        q = q * (scale / tl.sqrt(tl.sum(q * q, 0) + eps))
        k = k * (1 / tl.sqrt(tl.sum(k * k, 0) + eps))
        update_logit = tl.load(gates + row * gates_stride + head).to(tl.float32)
        gate = tl.load(gates + row * gates_stride + heads + head).to(tl.float32) + bias
        softplus = tl.where(gate > 20, gate, tl.log(1 + tl.exp(tl.minimum(gate, 20.0))))
        s = s * tl.exp(-decay_rate * softplus)
        change = (v - tl.sum(s * k[:, None], 0)) / (1 + tl.exp(-update_logit))
        s += k[:, None] * change[None, :]
        result = tl.sum(s * q[:, None], 0)
        tl.store(
            out + (row * heads + head) * value_dim + columns, result.to(out.dtype.element_ty), mask=is_column
        )
        for save in tl.static_range(NUM_SAVES):
            pair = saves + (sequence * NUM_SAVES + save) * 2
            saved = tl.load(pair + 1) * heads + head
            saved_addresses = states + (saved * key_dim + keys[:, None]) * value_dim + columns[None, :]
            is_saved = tl.load(pair) + keys * 0 == row + 1 - first
            tl.store(saved_addresses, s, mask=is_element & is_saved[:, None])
    tl.store(addresses, s, mask=is_element)


@triton.jit
def apply_gate(
    out, x, gate, heads, dim, x_row_stride, x_head_stride, gate_row_stride, gate_head_stride,
    WIDTH: tl.constexpr, IS_SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply one head of one row by the sigmoid or the SiLU of its gates. Grid: rows * heads."""
    launch_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    is_column = columns < dim
    token, head = row // heads, row % heads
    x_offsets = token * x_row_stride + head * x_head_stride + columns
    values = tl.load(x + x_offsets, mask=is_column, other=0.0).to(tl.float32)
    gate_offsets = token * gate_row_stride + head * gate_head_stride + columns
    gates = tl.load(gate + gate_offsets, mask=is_column, other=0.0).to(tl.float32)
    factors = 1 / (1 + tl.exp(-gates))
    if IS_SILU:
        factors = gates * factors
    tl.store(out + row * dim + columns, (values * factors).to(out.dtype.element_ty), mask=is_column)
