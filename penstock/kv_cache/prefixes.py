"""`PrefixIndex`: finds the cached blocks of a prefix, and the blocks that running requests are computing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.kv_cache.block_pool import BlockPool
from penstock.kv_cache.events import CacheEventLog
from penstock.kv_cache.hashing import chain_digests, context_root
from penstock.kv_cache.host_blocks import HostBlocks
from penstock.kv_cache.spec import KVCacheSpec
from penstock.kv_cache.states import SavedStates
from penstock.pipelines.core import InputContext
from penstock.pipelines.core.cache_events import CacheEvent


@dataclass(slots=True)
class DigestChain:
    """The digests of the full blocks of a context, for its current tokens."""

    root: bytes
    """The parent of the first block's digest."""
    num_tokens: int
    digests: list[bytes]
    num_cached: int = 0
    """Number of leading blocks that the last lookup found in all groups without a window."""


class PrefixIndex:
    """Finds blocks by the digests of their content in the pools of all groups.

    The digests of a waiting context are stored until its length changes, it is claimed or cancelled, or
    `forget_all` is called.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        pools: Sequence[BlockPool],
        block_size: int,
        adapter_digest: Callable[[InputContext], bytes] | None,
    ) -> None:
        self._spec = spec
        self._block_size = block_size
        self._adapter_digest = adapter_digest
        self._pools_without_window = [
            pool for pool, group in zip(pools, spec.groups, strict=True) if group.window is None
        ]
        self._window_pools = [
            (pool, group) for pool, group in zip(pools, spec.groups, strict=True) if group.window is not None
        ]
        self._pools = pools
        self._events: CacheEventLog | None = None
        self.host: HostBlocks | None = None
        """The evicted blocks in host memory; None if evicted blocks are dropped."""
        self.saved_states: SavedStates | None = None
        """The saved recurrent states; None for a model without recurrent states."""
        self._chains: dict[str, DigestChain] = {}
        self._in_flight: dict[bytes, int] = {}

    def root(self, context: InputContext) -> bytes | None:
        """Return the parent of the first block's digest, or None if a context's blocks must not be shared."""
        return context_root(context, self._spec.regime(context.current_length), self._adapter_digest)

    def chain(self, context: InputContext) -> DigestChain | None:
        """Return the digests of a context that is not claimed yet; None if its blocks must not be shared."""
        chain = self._chains.get(context.request_id)
        if chain is not None and chain.num_tokens == context.current_length:
            return chain
        root = self.root(context)
        if root is None:
            return None
        digests = self.digests(context, root, range(context.current_length // self._block_size))
        chain = DigestChain(root, context.current_length, digests)
        self._chains[context.request_id] = chain
        return chain

    def digests(self, context: InputContext, parent: bytes, blocks: range) -> list[bytes]:
        """Return the digests of full blocks of a context, for its current tokens."""
        overrides = context.token_hash_overrides
        return chain_digests(parent, context.all_tokens, overrides, blocks, self._block_size)

    def register(
        self, context: InputContext, parent: bytes, blocks: range, tables: Sequence[list[int]]
    ) -> list[bytes]:
        """Register computed blocks, so that other contexts can find them, and return their digests.

        Args:
            context: the context that computed the blocks.
            parent: the digest of the block before the first of ``blocks``; for block 0 the result of `root`.
            blocks: the indices of the blocks in the context.
            tables: the ids of the blocks in each pool.
        """
        digests = self.digests(context, parent, blocks)
        are_registered = [
            [pool.register(block, digest) for block, digest in zip(table, digests, strict=True)]
            for pool, table in zip(self._pools, tables, strict=True)
        ]
        if self._events is not None and any(are_registered[self._pools.index(self._recorded_pool)]):
            size = self._block_size
            tokens = context.all_tokens[blocks.start * size : blocks.stop * size].tolist()
            parent_digest = parent if blocks.start else None
            self._events.add_stored(digests, parent_digest, tokens, context.adapter)
        return digests

    def record_events(self) -> None:
        """Record the events of the first pool without a window; of the first pool if all have a window."""
        if self._events is None:
            self._events = CacheEventLog()
            self._recorded_pool.on_evict = self._events.add_removed

    def take_events(self) -> list[CacheEvent]:
        """Return the events since the last call; empty if events are not recorded."""
        return [] if self._events is None else self._events.take()

    def restore(self, chain: DigestChain, max_blocks: int) -> None:
        """Move evicted blocks among the first ``max_blocks`` of a chain to the device, see `HostBlocks`."""
        if self.host is not None:
            self.host.restore(chain.digests[:max_blocks], self.num_cached_blocks(chain, max_blocks))

    def forget_all(self) -> None:
        """Remove all blocks from the index, and all blocks from host memory."""
        if self.host is not None:
            self.host.clear()
        for pool in self._pools:
            pool.forget()
        self._chains.clear()
        if self.saved_states is not None:
            self.saved_states.clear()
        if self._events is not None:
            self._events.add_cleared()

    @property
    def _recorded_pool(self) -> BlockPool:
        return self._pools_without_window[0] if self._pools_without_window else self._pools[0]

    def forget(self, request_id: str) -> None:
        """Drop the digests of a waiting context."""
        self._chains.pop(request_id, None)

    def num_cached_blocks(self, chain: DigestChain, max_blocks: int) -> int:
        """Return the number of leading blocks, at most ``max_blocks``, that do not have to be computed.

        Layers without a window have all these blocks in the cache. Layers with a window have at least the
        blocks that the next query sees.
        """
        return self._num_cached_from(chain, 0, max_blocks)

    def num_usable_blocks(self, context: InputContext, chain: DigestChain, max_blocks: int) -> int:
        """Return the number of cached leading blocks, at most ``max_blocks``, after which a step can begin.

        A step cannot begin inside an image with bidirectional attention. With recurrent states, it can only
        begin at a position whose state is saved.
        """
        num_cached = self.num_cached_blocks(chain, max_blocks)
        while (
            start := context.boundary_before(num_cached * self._block_size)
        ) < num_cached * self._block_size:
            num_cached = self.num_cached_blocks(chain, start // self._block_size)
        if self.saved_states is not None:
            while num_cached and chain.digests[num_cached - 1] not in self.saved_states:
                num_cached -= 1
        return num_cached

    def is_awaited(self, chain: DigestChain, max_blocks: int) -> bool:
        """Return whether a claimed context is computing the first uncached block of a chain.

        The blocks after the first ``max_blocks`` are ignored.

        The scheduler calls this method for many contexts in each step. The lookup therefore continues at
        ``chain.num_cached``, where the last lookup ended. If an earlier block has been evicted since the last
        lookup, the result can be wrong.
        """
        start = (
            chain.num_cached
            if chain.num_cached <= max_blocks and self._is_known(chain, chain.num_cached - 1)
            else 0
        )
        num_cached = self._num_cached_from(chain, start, max_blocks)
        if num_cached >= max_blocks or chain.digests[num_cached] not in self._in_flight:
            return False
        # With recurrent states, waiting only helps if the other context saves the state after the last block.
        is_last = max_blocks == chain.num_tokens // self._block_size
        return self.saved_states is None or (is_last and chain.digests[max_blocks - 1] in self._in_flight)

    def mark_in_flight(self, digests: Iterable[bytes]) -> None:
        """Mark the blocks with these digests as in flight, that is, being computed."""
        for digest in digests:
            self._in_flight[digest] = self._in_flight.get(digest, 0) + 1

    def clear_in_flight(self, digests: Iterable[bytes]) -> None:
        """Remove one mark per digest, because the block was computed or its computation was abandoned."""
        for digest in digests:
            self._in_flight[digest] -= 1
            if not self._in_flight[digest]:
                del self._in_flight[digest]

    @property
    def has_in_flight(self) -> bool:
        """Whether any block is being computed."""
        return bool(self._in_flight)

    @property
    def num_in_flight(self) -> int:
        """The number of in-flight marks. A block that several contexts compute has several marks."""
        return sum(self._in_flight.values())

    def _num_cached_from(self, chain: DigestChain, start: int, max_blocks: int) -> int:
        num_cached = start
        while num_cached < max_blocks and self._is_known(chain, num_cached):
            num_cached += 1
        chain.num_cached = num_cached
        while num_cached and (missing_block := self._last_missing_block(chain, num_cached)) is not None:
            num_cached = missing_block  # a longer prefix would need the missing block
        return num_cached

    def _is_known(self, chain: DigestChain, block: int) -> bool:
        """Return whether all groups without a window have a block in the cache. False for block -1."""
        return block >= 0 and all(
            pool.lookup(chain.digests[block]) is not None for pool in self._pools_without_window
        )

    def _last_missing_block(self, chain: DigestChain, num_cached: int) -> int | None:
        """Return the last block before ``num_cached`` that a window needs and that is not cached, or None."""
        for pool, group in self._window_pools:
            first_block = group.first_visible(num_cached * self._block_size) // self._block_size
            for block in range(num_cached - 1, first_block - 1, -1):
                if pool.lookup(chain.digests[block]) is None:
                    return block
        return None


class PrefixCacheControls:
    """The methods of a `KVCache` that only access its prefix index."""

    _prefixes: PrefixIndex

    def forget_prefixes(self) -> None:
        self._prefixes.forget_all()

    def record_events(self) -> None:
        self._prefixes.record_events()

    def take_events(self) -> list[CacheEvent]:
        return self._prefixes.take_events()
