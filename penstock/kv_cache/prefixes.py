"""Which beginning of a context is known already, and which is being computed right now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.kv_cache.block_pool import BlockPool
from penstock.kv_cache.hashing import chain_digests, chain_root
from penstock.kv_cache.spec import KVCacheSpec
from penstock.pipelines.core import InputContext, TextAndVisionContext


@dataclass(slots=True)
class Chain:
    """The digests of a context's full blocks, as its tokens are now."""

    root: bytes
    num_tokens: int
    digests: list[bytes]
    hit: int = 0
    """Blocks that were cached when last looked, windows aside: where the next look may begin."""


class PrefixIndex:
    """Finds blocks by content in the pools of all groups.

    The digests of a waiting context are computed once, and forgotten when it is claimed or given up.
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
        self._whole = [pool for pool, group in zip(pools, spec.groups, strict=True) if group.window is None]
        self._windowed = [
            (pool, group) for pool, group in zip(pools, spec.groups, strict=True) if group.window is not None
        ]
        self._chains: dict[str, Chain] = {}
        self._promised: dict[bytes, int] = {}

    def root(self, context: InputContext) -> bytes | None:
        """The root of a context's digests; None where its blocks must not be known to others.

        An adapter changes keys and values, so its content is part of the root: without a way to learn it
        (the name alone may come to mean another adapter) nothing is shared. Nor are images told apart by
        their tokens, which are the same for all: who shares them names them in ``token_hash_overrides``.
        Keys of one regime are of no use in another.
        """
        has_image = isinstance(context, TextAndVisionContext) and bool(context.pixel_values)
        if has_image and not context.token_hash_overrides:
            return None
        regime = self._spec.regime(context.current_length)
        if context.adapter is None:
            return chain_root(None, context.cache_salt, regime)
        if self._adapter_digest is None:
            return None
        return chain_root(self._adapter_digest(context), context.cache_salt, regime)

    def chain(self, context: InputContext) -> Chain | None:
        """The digests of a context that is not claimed yet."""
        chain = self._chains.get(context.request_id)
        if chain is not None and chain.num_tokens == context.current_length:
            return chain
        root = self.root(context)
        if root is None:
            return None
        digests = self.digests(context, root, range(context.current_length // self._block_size))
        chain = Chain(root, context.current_length, digests)
        self._chains[context.request_id] = chain
        return chain

    def digests(self, context: InputContext, parent: bytes, blocks: range) -> list[bytes]:
        """The digests of some full blocks of a context, as its tokens are now."""
        overrides = context.token_hash_overrides
        return chain_digests(parent, context.all_tokens, overrides, blocks, self._block_size)

    def forget(self, request_id: str) -> None:
        """Drops what is remembered of a waiting context."""
        self._chains.pop(request_id, None)

    def hit(self, chain: Chain, limit: int) -> int:
        """How many blocks from the beginning, at most ``limit``, need not be computed.

        For layers without a window all of these are cached; for those with one, the last ones, as far back
        as the next query sees.
        """
        return self._hit_from(chain, 0, limit)

    def is_awaited(self, chain: Chain, limit: int) -> bool:
        """Whether the first of ``limit`` blocks that is not cached is about to be.

        Asked of many contexts in each step, so it looks on from where it ended the last time. Should a
        block before that have been evicted since, the answer is out of date, which does no harm: who waits,
        waits for somebody who is running.
        """
        start = chain.hit if chain.hit <= limit and self._is_known(chain, chain.hit - 1) else 0
        hit = self._hit_from(chain, start, limit)
        return hit < limit and chain.digests[hit] in self._promised

    def mark_in_flight(self, digests: Iterable[bytes]) -> None:
        """Blocks of these contents are about to be computed."""
        for digest in digests:
            self._promised[digest] = self._promised.get(digest, 0) + 1

    def clear_in_flight(self, digests: Iterable[bytes]) -> None:
        """They have been, or will not be after all."""
        for digest in digests:
            self._promised[digest] -= 1
            if not self._promised[digest]:
                del self._promised[digest]

    @property
    def has_in_flight(self) -> bool:
        """Whether anything is about to be computed."""
        return bool(self._promised)

    @property
    def num_in_flight(self) -> int:
        """Promises given, each claimed context counted for itself."""
        return sum(self._promised.values())

    def _hit_from(self, chain: Chain, start: int, limit: int) -> int:
        hit = start
        while hit < limit and self._is_known(chain, hit):
            hit += 1
        chain.hit = hit
        while hit and (gap := self._gap(chain, hit)) is not None:
            hit = gap  # any hit beyond the gap would see into it
        return hit

    def _is_known(self, chain: Chain, block: int) -> bool:
        return block >= 0 and all(pool.lookup(chain.digests[block]) is not None for pool in self._whole)

    def _gap(self, chain: Chain, hit: int) -> int | None:
        """The last block before ``hit`` which a window still needs and its pool has not."""
        for pool, group in self._windowed:
            first = group.first_visible(hit * self._block_size) // self._block_size
            for block in range(hit - 1, first - 1, -1):
                if pool.lookup(chain.digests[block]) is None:
                    return block
        return None
