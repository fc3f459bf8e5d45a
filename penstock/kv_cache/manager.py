"""`KVCacheManager`: the paged KV cache of a model, with slots, block tables and shared prefixes.

Block tables of a context with S = 4 tokens per block and two groups of layers, one with window 6::

    tokens             0 1 2 3 | 4 5 6 7 | 8 9 . . | . . . .       start_idx = 10
    without a window     7     |    2    |    5    |    9
    window 6             0     |    4    |    6    |    1          the query at 10 sees 5 .. 10
                       committed: full,    exclusive: this step
                       read-only, may be   or the next (lookahead)
                       shared              writes here

Entries of blocks before the window hold the null block, 0. All tables of a context have the same length.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.errors import InputError, InsufficientBlocksError
from penstock.kernels import KVCacheInputs, KVGroupInputs, StateInputs, upload, uploaded_together
from penstock.kv_cache.block_pool import NULL_BLOCK, BlockPool
from penstock.kv_cache.block_tables import BlockTables
from penstock.kv_cache.cached_sequence import CachedSequence
from penstock.kv_cache.host_blocks import HostBlocks
from penstock.kv_cache.prefault import CachePrefault
from penstock.kv_cache.prefixes import PrefixCacheControls, PrefixIndex
from penstock.kv_cache.sequence_states import SequenceState, SequenceStates
from penstock.kv_cache.spec import KVCacheSpec
from penstock.kv_cache.storage import KVCacheStorage
from penstock.pipelines.core import InputContext


class KVCacheManager(PrefixCacheControls):
    """The paged KV cache of a model. `KVCache` describes the methods.

    Args:
        spec: the groups of layers of the model.
        num_blocks: number of blocks to allocate for each group, including the null block.
        block_size: tokens per block, a power of two.
        device: the device of keys and values.
        enable_prefix_caching: whether contexts share the blocks of common prefixes.
        adapter_digest: returns the digest of a context's adapter. If None, contexts with an adapter share no
            blocks.
        host_memory: bytes of host memory for cached blocks that are evicted from the device; 0 for none.
        fixed_scales: see `KVCacheStorage`.
        num_states: maximum number of claimed contexts of a model with `KVCacheSpec.states`. With prefix
            caching, as many saved states are also allocated.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        num_blocks: Sequence[int],
        block_size: int = 32,
        *,
        device: torch.device = torch.device("cpu"),  # noqa: B008  # immutable
        enable_prefix_caching: bool = True,
        adapter_digest: Callable[[InputContext], bytes] | None = None,
        host_memory: int = 0,
        fixed_scales: Mapping[int, Tensor] | None = None,
        num_states: int = 0,
    ) -> None:
        assert len(num_blocks) == len(spec.groups), f"{len(num_blocks)} pools, {len(spec.groups)} groups"
        assert block_size.bit_count() == 1, f"the block size must be a power of two, was {block_size}"
        self.spec = spec
        self.block_size = block_size
        self.max_length: int | None = None
        self.device = device
        self.storage = KVCacheStorage(spec, num_blocks, block_size, device, fixed_scales)
        self._group_of_layer = spec.group_of_layer
        self._window_groups = [(i, group) for i, group in enumerate(spec.groups) if group.window is not None]
        self._states: SequenceStates | None = None
        self._enable_prefix_caching = enable_prefix_caching
        self._pools = [BlockPool(count) for count in num_blocks]
        self._prefixes = PrefixIndex(spec, self._pools, block_size, adapter_digest)
        if spec.states is not None:
            self._states = SequenceStates(
                spec.states,
                num_states,
                saves_prefixes=enable_prefix_caching,
                block_size=block_size,
                device=device,
            )
            self._prefixes.saved_states = self._states.saved
        if host_memory:
            self._prefixes.host = HostBlocks(spec, self._pools, self.storage, host_memory)
        self._sequences: dict[int, CachedSequence] = {}  # slot -> sequence
        self._free_slots: list[int] = []  # a heap of slots
        self._tables = BlockTables(len(spec.groups))
        self._prefault = CachePrefault(self.storage, self._pools, spec)

    @property
    def num_blocks(self) -> int:
        return min(pool.num_blocks for pool in self._pools)

    @property
    def num_free_blocks(self) -> int:
        return min(pool.num_free for pool in self._pools)

    @property
    def num_cached_blocks(self) -> int:
        return min(self._pools, key=lambda pool: pool.num_free).num_cached

    @property
    def prefix_limits(self) -> tuple[int, ...] | None:
        return self.spec.key_limits if self._enable_prefix_caching else None

    def fits(self, num_tokens: int, chunk_size: int | None = None) -> bool:
        return all(
            group.max_blocks(num_tokens, self.block_size, chunk_size) <= pool.num_blocks
            for group, pool in zip(self.spec.groups, self._pools, strict=True)
        )

    def admits(self, context: InputContext, *, chunk_size: int | None = None, headroom: int = 0) -> bool:
        if self._states is not None and not self._states.has_free(len(self._sequences)):
            return False
        digests: list[bytes] = []
        chain = self._prefixes.chain(context) if self._uses_prefix_cache(context) else None
        if chain is not None:
            max_cached = self._max_cached_blocks(context)
            digests = chain.digests[: self._prefixes.num_usable_blocks(context, chain, max_cached)]
        num_needed = -(-context.current_length // self.block_size)
        for group, pool in zip(self.spec.groups, self._pools, strict=True):
            first_block = group.first_visible(len(digests) * self.block_size) // self.block_size
            cached_blocks = [pool.lookup(digest) for digest in digests[first_block:]]
            num_shared = sum(block is not None and pool.num_references(block) > 0 for block in cached_blocks)
            max_blocks = group.max_blocks(context.current_length, self.block_size, chunk_size)
            if pool.num_free < min(max_blocks, num_needed - first_block - num_shared) + headroom:
                return False
        return True

    def claim(self, context: InputContext) -> None:
        if context.is_assigned_to_cache:
            self._sequence(context)
            return
        sequence = self._assign_slot(context)
        if self._enable_prefix_caching:
            self._use_cached_prefix(context, sequence)
        self._prefixes.forget(context.request_id)
        num_cached = sequence.num_committed * self.block_size
        context.set_token_indices(start_idx=num_cached, committed_idx=num_cached)
        if not len(context.generated_tokens):
            context.num_cached_tokens = num_cached

    def reserve(self, context: InputContext, lookahead: int = 0) -> None:
        sequence = self._sequence(context)
        if self._is_rolled_back(context, sequence):
            self._roll_back(context, sequence)
        end = context.active_idx + lookahead
        if end <= sequence.num_blocks * self.block_size:
            return
        num_blocks = -(-end // self.block_size)
        num_missing = num_blocks - sequence.num_blocks
        self._check_num_free(num_missing)
        self._tables.grow(length=num_blocks)
        for index, pool in enumerate(self._pools):
            row = self._tables.row(index, sequence.slot)
            row[sequence.num_blocks : num_blocks] = pool.allocate(num_missing)
        sequence.num_blocks = num_blocks

    def num_missing_blocks(self, context: InputContext, lookahead: int = 0) -> int:
        sequence = self._sequence(context)
        # `reserve` first frees blocks of a context that was rolled back, at most all of its blocks.
        num_assigned = 0 if self._is_rolled_back(context, sequence) else sequence.num_blocks
        return max(-(-(context.active_idx + lookahead) // self.block_size) - num_assigned, 0)

    def steps_left(self, context: InputContext) -> int | None:
        length = context.current_length
        num_tokens_left = None if self.max_length is None else self.max_length - length
        return min(
            (n for n in (num_tokens_left, self.spec.steps_left(length)) if n is not None), default=None
        )

    def commit(self, context: InputContext) -> None:
        sequence = self._sequence(context)
        num_committed = min(context.start_idx // self.block_size, sequence.num_blocks)
        if num_committed > sequence.num_committed:
            self._register(context, sequence, num_committed)
            context.set_token_indices(committed_idx=num_committed * self.block_size)
        if self._states is not None and sequence.state is not None:
            self._states.commit(sequence.state, context.start_idx, sequence.digests)
        for index, group in self._window_groups:
            first_block = min(
                group.first_visible(context.start_idx) // self.block_size, sequence.num_committed
            )
            if first_block > sequence.num_dropped[index]:
                row = self._tables.row(index, sequence.slot)[sequence.num_dropped[index] : first_block]
                self._pools[index].release(row.tolist())
                row[:] = NULL_BLOCK
                sequence.num_dropped[index] = first_block

    def fork(self, parent: InputContext, child: InputContext) -> None:
        assert not child.is_assigned_to_cache, f"{child.request_id} is already claimed"
        parent_sequence = self._sequence(parent)
        if self._is_rolled_back(parent, parent_sequence):
            self._roll_back(parent, parent_sequence)
        self.commit(parent)
        start = parent.start_idx
        assert np.array_equal(parent.all_tokens[:start], child.all_tokens[:start]), (
            f"{child.request_id} does not begin with the {start} computed tokens of {parent.request_id}"
        )
        num_committed, num_partial = parent_sequence.num_committed, int(start % self.block_size > 0)
        self._check_num_free(num_partial)
        sequence = self._assign_slot(child)
        sequence.regime, sequence.root = parent_sequence.regime, parent_sequence.root
        sequence.digests = list(parent_sequence.digests)
        sequence.num_dropped = list(parent_sequence.num_dropped)
        sequence.num_committed, sequence.num_blocks = num_committed, num_committed + num_partial
        if self._states is not None and parent_sequence.state is not None and sequence.state is not None:
            self._states.fork(parent_sequence.state, sequence.state)
        self._tables.grow(length=sequence.num_blocks)
        for index, pool in enumerate(self._pools):
            parent_blocks = self._tables.row(index, parent_sequence.slot)
            child_blocks = self._tables.row(index, sequence.slot)
            pool.retain(parent_blocks[parent_sequence.num_dropped[index] : num_committed].tolist())
            child_blocks[:num_committed] = parent_blocks[:num_committed]
            for block in pool.allocate(num_partial):
                self.storage.copy_block(index, int(parent_blocks[num_committed]), block)
                child_blocks[num_committed] = block
        child.set_token_indices(start_idx=start, committed_idx=num_committed * self.block_size)

    def release(self, context: InputContext) -> None:
        self._prefixes.forget(context.request_id)
        if not context.is_assigned_to_cache:
            return
        sequence = self._sequence(context)
        if self._states is not None and sequence.state is not None:
            self._states.release(sequence.state)
        self._truncate(sequence, 0)
        del self._sequences[sequence.slot]
        heapq.heappush(self._free_slots, sequence.slot)
        context.unassign_from_cache()

    def waits_for(self, context: InputContext) -> bool:
        if context.is_assigned_to_cache or not self._prefixes.has_in_flight:
            return False
        chain = self._prefixes.chain(context) if self._uses_prefix_cache(context) else None
        return chain is not None and self._prefixes.is_awaited(chain, self._max_cached_blocks(context))

    def is_stale(self, context: InputContext) -> bool:
        can_be_stale = bool(self.spec.key_limits) and context.is_assigned_to_cache
        return can_be_stale and self._sequence(context).regime != self.spec.regime(context.current_length)

    def discard_storage(self) -> None:
        assert not self._sequences, f"{len(self._sequences)} contexts hold blocks"
        self._prefault.stop()
        self.storage.discard()
        if self._states is not None:
            self._states.discard()
        self.forget_prefixes()

    def prefault_next_pages(self) -> bool:
        return self._prefault.populate_next()

    def inputs(
        self,
        contexts: Sequence[InputContext],
        starts: Sequence[int] | None = None,  # [B]
        counts: Sequence[int] | None = None,  # [B]
    ) -> KVCacheInputs:
        """Return the attention inputs of a batch whose blocks are reserved.

        For a model with recurrent states, also reserve space for the states that the step saves.

        Args:
            contexts: the batch.
            starts: position of each context's first token in this step; by default its ``start_idx``.
            counts: number of each context's tokens and drafts in this step; by default ``active_length``.
        """
        starts = [context.start_idx for context in contexts] if starts is None else starts
        counts = [context.active_length for context in contexts] if counts is None else counts
        sequences = [self._sequence(context) for context in contexts]
        slots = [sequence.slot for sequence in sequences]
        max_blocks = max([1, *[sequence.num_blocks for sequence in sequences]])
        end_positions = np.array(starts, np.int64) + np.array(counts, np.int64)  # [B]
        tables = self._tables.batch_tables(slots, max_blocks, end_positions, counts, self.block_size)
        with uploaded_together(self.device):
            groups = tuple(
                KVGroupInputs(
                    upload(table, self.device), upload(slot_mapping, self.device), *group.input_options
                )
                for group, (table, slot_mapping) in zip(self.spec.groups, tables, strict=True)
            )
            lengths = upload(end_positions.astype(np.int32), self.device)
        return KVCacheInputs(
            lengths=lengths,
            groups=groups,
            group_of_layer=self._group_of_layer,
            caches=self.storage.caches,
            scales=self.storage.scales,
            block_size=self.block_size,
            states=self._state_inputs(sequences, starts, end_positions.tolist()),
        )

    def check_integrity(self) -> None:
        for index, pool in enumerate(self._pools):
            ranges = {}
            for sequence in self._sequences.values():
                num_dropped, num_blocks = sequence.num_dropped[index], sequence.num_blocks
                assert num_dropped <= sequence.num_committed <= num_blocks, f"{sequence}"
                ranges[sequence.slot] = range(num_dropped, num_blocks)
            self._tables.check_integrity(index, pool, ranges)
        num_in_flight = sum(len(sequence.in_flight) for sequence in self._sequences.values())
        num_indexed = self._prefixes.num_in_flight
        assert num_in_flight == num_indexed, f"{num_in_flight} blocks in flight, {num_indexed} in the index"
        if self._states is not None:
            states = (sequence.state for sequence in self._sequences.values())
            self._states.check_integrity(state for state in states if state is not None)
        slots = sorted([*self._sequences, *self._free_slots])
        assert slots == list(range(len(slots))), f"slots {slots}"

    def _assign_slot(self, context: InputContext) -> CachedSequence:
        if self._states is not None:
            self._states.check_free(len(self._sequences))
        slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._sequences)
        context.assign_to_cache(slot)
        self._tables.grow(num_slots=slot + 1)
        regime = self.spec.regime(context.current_length)
        state = None if self._states is None else SequenceState(slot)
        num_dropped = [0] * len(self._pools)
        self._sequences[slot] = CachedSequence(context.request_id, slot, num_dropped, regime, state=state)
        return self._sequences[slot]

    def _sequence(self, context: InputContext) -> CachedSequence:
        sequence = self._sequences.get(context.cache_seq_id)
        if sequence is None or sequence.request_id != context.request_id:
            raise InputError(
                f"request {context.request_id} is assigned to slot {context.cache_seq_id}, but not by this "
                "KV cache: assign slots only with KVCache.claim"
            )
        return sequence

    def _use_cached_prefix(self, context: InputContext, sequence: CachedSequence) -> None:
        """Assign the cached blocks of the prefix, and mark the other full blocks as being computed."""
        chain = self._prefixes.chain(context)
        if chain is None:
            return
        num_cached = 0
        if self._uses_prefix_cache(context):
            self._prefixes.restore(chain, self._max_cached_blocks(context))
            num_cached = self._prefixes.num_usable_blocks(context, chain, self._max_cached_blocks(context))
        if self._states is not None and sequence.state is not None:
            max_cached = self._max_cached_blocks(context)
            sequence.state.num_cached_at_claim = self._prefixes.num_cached_blocks(chain, max_cached)
            self._states.restore(sequence.state, chain.digests[:num_cached])
        self._tables.grow(length=num_cached)
        for index, (group, pool) in enumerate(zip(self.spec.groups, self._pools, strict=True)):
            first_block = group.first_visible(num_cached * self.block_size) // self.block_size
            blocks = [pool.registered_block(digest) for digest in chain.digests[first_block:num_cached]]
            pool.retain(blocks)
            self._tables.row(index, sequence.slot)[first_block:num_cached] = blocks
            sequence.num_dropped[index] = first_block
        sequence.root, sequence.digests = chain.root, chain.digests[:num_cached]
        sequence.num_committed = sequence.num_blocks = num_cached
        sequence.in_flight = chain.digests[num_cached:][::-1]
        self._prefixes.mark_in_flight(sequence.in_flight)

    def _register(self, context: InputContext, sequence: CachedSequence, num_committed: int) -> None:
        """Commit the blocks of a sequence up to ``num_committed``. Register them if they can be shared."""
        blocks = range(sequence.num_committed, num_committed)
        if sequence.root is not None:
            # Hash the blocks again: a rollback may have changed tokens since `claim` hashed the blocks.
            parent = sequence.digests[-1] if sequence.digests else sequence.root
            rows = [self._tables.row(index, sequence.slot) for index in range(len(self._pools))]
            tables = [row[blocks.start : blocks.stop].tolist() for row in rows]
            sequence.digests += self._prefixes.register(context, parent, blocks, tables)
        computed_digests = sequence.in_flight[-len(blocks) :]
        self._prefixes.clear_in_flight(computed_digests)
        del sequence.in_flight[len(sequence.in_flight) - len(computed_digests) :]
        sequence.num_committed = num_committed

    def _state_inputs(
        self, sequences: Sequence[CachedSequence], starts: Sequence[int], ends: Sequence[int]
    ) -> StateInputs | None:
        """Return the recurrent states of a batch; None for a model without such states.

        Also reserve space for the states that the step saves.
        """
        if self._states is None:
            return None
        states = [sequence.state for sequence in sequences if sequence.state is not None]
        return self._states.inputs(states, starts, ends, [sequence.digest for sequence in sequences])

    def _is_rolled_back(self, context: InputContext, sequence: CachedSequence) -> bool:
        """Return whether the next step cannot continue from the cached data.

        It would write committed blocks, need freed blocks, or need the recurrent state of another position.
        """
        start, num_committed_tokens = context.start_idx, sequence.num_committed * self.block_size
        if start < num_committed_tokens or context.committed_idx < num_committed_tokens:
            return True
        if sequence.state is not None and start not in (0, sequence.state.length):
            return True
        return any(
            group.first_visible(start) // self.block_size < sequence.num_dropped[index]
            for index, group in self._window_groups
        )

    def _roll_back(self, context: InputContext, sequence: CachedSequence) -> None:
        """Roll a context back to the last block boundary from which it can continue."""
        num_blocks = min(context.start_idx, context.committed_idx) // self.block_size
        num_blocks = context.boundary_before(num_blocks * self.block_size) // self.block_size
        for index, group in self._window_groups:
            first_block = group.first_visible(num_blocks * self.block_size) // self.block_size
            if first_block < sequence.num_dropped[index]:
                num_blocks = 0  # needed blocks were freed: compute all tokens again
        if self._states is not None and sequence.state is not None:
            self._states.release(sequence.state)
            num_blocks = 0  # a state cannot be rolled back
        self._truncate(sequence, num_blocks)
        start = num_blocks * self.block_size
        context.set_token_indices(start_idx=start, committed_idx=start)

    def _truncate(self, sequence: CachedSequence, num_blocks: int) -> None:
        for index, pool in enumerate(self._pools):
            row = self._tables.row(index, sequence.slot)[: sequence.num_blocks]
            sequence.num_dropped[index] = min(sequence.num_dropped[index], num_blocks)
            pool.release(block for block in row[num_blocks:].tolist() if block != NULL_BLOCK)
            row[num_blocks:] = NULL_BLOCK
        self._prefixes.clear_in_flight(sequence.in_flight)
        sequence.in_flight = []
        sequence.num_committed = min(sequence.num_committed, num_blocks)
        sequence.num_blocks = num_blocks
        del sequence.digests[num_blocks:]

    def _check_num_free(self, count: int) -> None:
        for pool in self._pools:
            if pool.num_free < count:
                raise InsufficientBlocksError(count, pool.num_free, pool.num_blocks)

    def _uses_prefix_cache(self, context: InputContext) -> bool:
        # Log probabilities of prompt tokens need the logits at all positions of the prompt.
        return self._enable_prefix_caching and not context.log_probabilities_echo

    def _max_cached_blocks(self, context: InputContext) -> int:
        return (context.active_idx - 1) // self.block_size  # excludes the last token, whose logits are needed
