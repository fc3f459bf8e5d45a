"""The tensor structs that operations read. Letters in shapes:

T tokens of the ragged batch, B sequences, H heads, K kv heads, D head dim, S block size, N blocks or states,
M maximum blocks per sequence in this step, V vocabulary, L layers, E hidden size, C channels of a
convolution, F dimensions of a value head. R is the number of rows of logits or of selected rows, and in
matrices of adapters the maximum rank. Other letters are explained where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceBlocks:
    """The blocks of the temporary KV cache that `Ops.encoder_attention` of some back ends fills.

    Each sequence of the ragged batch begins with a new block. All layers of a step share one instance, see
    `Ops.sequence_blocks`.
    """

    block_tables: Tensor  # [B, M] int32
    slots: Tensor  # [T] int64: slot of each row, block * S + offset
    lengths: Tensor  # [B] int32
    num_blocks: int


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The paged KV cache of one attention layer in one step."""

    cache: Tensor  # [2, N, K, S, D]: keys, then values
    block_tables: Tensor  # [B, M] int32; 0 (null block): the block is freed, or beyond the sequence
    slots: Tensor  # [T] int64: slot of each row, block * S + offset
    window: int | None = None  # a query attends to itself and window - 1 keys before it; None: no limit
    scales: Tensor | None = None  # [2, N, K, S] float32 for a cache of int8 or of 8-bit floats
    is_chunked: bool = False  # whether a query attends only from the last multiple of `window` on
    has_fixed_scales: bool = False  # whether `scales` has a fixed scale per head, which is only read


@dataclass(frozen=True, slots=True)
class LayerState:
    """The states of one layer with linear attention in one step. Operations update the states in place."""

    inputs: Tensor  # [N, W, C]: the last W rows of inputs of the convolution of each state
    recurrent: Tensor  # [N, H, D, F] float32
    slots: Tensor  # [B] int64: index of each sequence's state
    saves: Tensor  # [B * NUM_SAVES * 2] int64: see `StateInputs.saves`


@dataclass(frozen=True, slots=True)
class StateInputs:
    """The recurrent states of the batch in one step."""

    slots: Tensor  # [B] int64
    saves: Tensor  # [B * NUM_SAVES * 2] int64
    """`NUM_SAVES` pairs (n, index) for each sequence: the state after the first n rows of the sequence in
    this step is also written to this index. A pair with n = 0 has no effect. Another sequence with the same
    prefix can then continue from the saved state."""
    layers: tuple[tuple[Tensor, Tensor], ...]  # per layer: `LayerState.inputs` and `LayerState.recurrent`

    def layer(self, index: int) -> LayerState:
        """Return the states of a layer; ``index`` counts only the layers with linear attention."""
        return LayerState(*self.layers[index], self.slots, self.saves)

    def snapshot(self) -> Callable[[], None]:
        """Copy the states of the batch. Return a function that restores them."""
        copies = [(tensor, tensor[self.slots]) for layer in self.layers for tensor in layer]

        def restore() -> None:
            for tensor, values in copies:
                tensor[self.slots] = values

        return restore


@dataclass(frozen=True, slots=True)
class KVGroupInputs:
    """The block tables that all layers of a cache group share."""

    block_tables: Tensor  # [B, M] int32
    slots: Tensor  # [T] int64
    window: int | None = None
    is_chunked: bool = False
    has_fixed_scales: bool = False

    def slots_at(self, positions: Tensor, block_size: int) -> Tensor:  # [n, B] from positions [n, B]
        """Return the slots of n positions of each sequence.

        The blocks of these positions must be reserved.
        """
        blocks = self.block_tables.long().gather(1, (positions // block_size).T).T
        return blocks * block_size + positions % block_size


@dataclass(frozen=True, slots=True)
class KVCacheInputs:
    """The KV cache of the batch in one step."""

    lengths: Tensor  # [B] int32: keys per sequence, including the rows of this step
    groups: tuple[KVGroupInputs, ...]
    group_of_layer: tuple[int, ...]  # [L]
    caches: tuple[Tensor, ...]  # L of [2, N, K, S, D]
    scales: tuple[Tensor | None, ...]  # L of [2, N, K, S]
    block_size: int
    states: StateInputs | None = None
    """The states of layers with linear attention; None for a model without such layers."""

    def layer(self, index: int) -> LayerKV:
        """Return the cache of a layer; ``index`` counts only the layers with a KV cache."""
        group = self.groups[self.group_of_layer[index]]
        return LayerKV(
            self.caches[index],
            group.block_tables,
            group.slots,
            group.window,
            self.scales[index],
            group.is_chunked,
            group.has_fixed_scales,
        )

    def advance(self) -> KVCacheInputs:
        """Return the inputs of the next step of the same batch, in which each sequence adds one row.

        The block of each added row must be reserved (``KVCache.reserve(context, lookahead)``), so that this
        method needs no block pool. The method computes on the device of the tensors.
        """
        positions = self.lengths.long()  # [B]: the next row's position is the length so far
        groups = []
        for group in self.groups:
            groups.append(replace(group, slots=group.slots_at(positions[None], self.block_size)[0]))
        states = self.states and replace(self.states, saves=torch.zeros_like(self.states.saves))
        return replace(self, lengths=self.lengths + 1, groups=tuple(groups), states=states)


@dataclass(frozen=True)
class LoRAInputs:
    """The adapters of one step: the adapter of each row, and the matrices by checkpoint name."""

    rows: Tensor  # [T] int64: index of the row's adapter, -1 for none
    matrices: Mapping[str, tuple[Tensor, Tensor]]
    """By slice name, e.g. ``model.layers.0.self_attn.q_proj``: the matrices of n adapters, A ``[n, R, in]``
    and B ``[n, out, R]``. B includes the scale of the adapter. Kernels read B fastest if it is the transposed
    view of a contiguous ``[n, R, out]``."""
    ranks: Mapping[str, Tensor] = field(default_factory=dict)
    """By slice name, the rank of each adapter, ``[n]`` int64 in host memory; 0 for an adapter without
    matrices for the slice. All adapters have rank R for slices that are missing here."""

    @cached_property
    def groups(self) -> tuple[tuple[int, Tensor], ...]:
        """The indices of the adapters of this step, ascending, each with its rows ``[P]`` int64."""
        rows = self.rows.cpu().numpy()
        order = np.argsort(rows, kind="stable")[(rows < 0).sum() :]
        adapters, counts = np.unique(rows[order], return_counts=True)
        row_groups = torch.from_numpy(order).to(self.rows.device).split_with_sizes(counts.tolist())
        return tuple(zip(adapters.tolist(), row_groups, strict=True))

    def take(self, rows: Tensor) -> LoRAInputs:
        """Return the adapters for a selection of rows, ``rows [R]`` int64."""
        return replace(self, rows=self.rows[rows])

    def for_slices(self, names: Iterable[str]) -> LoRAInputs | None:
        """Return these inputs with only the matrices of the given slices; None if no slice has matrices."""
        adapted_names = [name for name in names if name in self.matrices]
        if not adapted_names:
            return None
        ranks = {name: self.ranks[name] for name in adapted_names if name in self.ranks}
        return LoRAInputs(self.rows, {name: self.matrices[name] for name in adapted_names}, ranks)


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Sampling parameters of each row of logits; see `Ops.sample`."""

    temperature: Tensor  # [R] float32; 0 is greedy
    top_k: Tensor  # [R] int64; 0 keeps all tokens
    top_p: Tensor  # [R] float32; 1 keeps all tokens
    min_p: Tensor  # [R] float32; 0 keeps all tokens
    uniforms: Tensor  # [R] float64 in [0, 1): the random number of the row, a function of (seed, position)
    has_top_k_or_top_p: bool = True
    """Whether any row that is not greedy has a top_k or a top_p. If False, the sampler of a GPU does not
    allocate a list of candidate tokens. The host computes this flag in advance,
    because it cannot read device tensors without waiting."""

    def take(self, rows: Tensor) -> SamplingInputs:
        """Return the parameters of a selection of rows, ``rows [n]`` int64; rows may repeat."""
        return SamplingInputs(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.uniforms[rows],
            self.has_top_k_or_top_p,
        )
