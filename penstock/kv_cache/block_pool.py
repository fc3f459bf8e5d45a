"""`BlockPool`: the free, referenced and cached KV blocks of one group of layers.

Each block except the null block is in exactly one of three states::

                      allocate                            register(block, digest)
        +----------+ ---------> +---------------------+ ------------------------> found by `lookup`
        |   free   |            |  referenced (n > 0) |
        |  (stack) | <--------- |                     | <-----+
        +----------+  release,  +---------------------+       | retain
             ^        unknown              | release,         |
             |        content              v known content    |
             |                  +---------------------+       |
             +----------------- |   cached (n = 0)    | ------+
               evict: the least |  oldest  ...  newest |
               recently used    +---------------------+

`forget` makes all cached blocks free. Eviction is part of `allocate`.

Block 0 is the null block. It fills the unused entries of block tables, and the entries of freed blocks before
a window. The null block is never allocated, and has neither references nor content. Allocation is
deterministic: the same calls give the same blocks.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable

from penstock.errors import InsufficientBlocksError

NULL_BLOCK = 0


class BlockPool:
    """Allocates blocks, counts the references to each block, and finds blocks by the digest of their content.

    Args:
        num_blocks: number of blocks, including the null block. The property `num_blocks` excludes it.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, f"a pool has at least the null block, not {num_blocks} blocks"
        self._references = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._blocks_by_digest: dict[bytes, int] = {}
        self._free_blocks = list(range(num_blocks - 1, 0, -1))
        self._num_ever_used = 1
        self._cached_blocks: OrderedDict[int, None] = OrderedDict()
        self.on_evict: Callable[[bytes], None] | None = None
        """Function that is called with the digest of each evicted block."""
        self.on_reuse: Callable[[int, bytes], None] | None = None
        """Function that is called with the id and the digest of each evicted block. The block still has its
        content."""

    @property
    def num_blocks(self) -> int:
        """The number of blocks in all states, without the null block."""
        return len(self._references) - 1

    @property
    def num_free(self) -> int:
        """The number of blocks that can be allocated now, including cached blocks."""
        return len(self._free_blocks) + len(self._cached_blocks)

    @property
    def num_ever_used(self) -> int:
        """The number of blocks that have been allocated at least once, including the null block.

        The ids of these blocks are 0 to ``num_ever_used - 1``, because the blocks that were never allocated
        are allocated in ascending order.
        """
        return self._num_ever_used

    @property
    def num_cached(self) -> int:
        """The number of blocks with known content and no references."""
        return len(self._cached_blocks)

    def num_references(self, block: int) -> int:
        """Return the number of references to ``block``."""
        return self._references[block]

    def reference_counts(self) -> list[int]:
        """Return the number of references of every block, including the null block."""
        return list(self._references)

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` blocks without known content, with one reference each.

        Evicts the least recently used cached blocks if too few other blocks are free.

        Raises:
            InsufficientBlocksError: fewer than ``count`` blocks are free or cached. No block is allocated.
        """
        if count > self.num_free:
            raise InsufficientBlocksError(count, self.num_free, self.num_blocks)
        blocks = [self._free_blocks.pop() if self._free_blocks else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        self._num_ever_used = max(self._num_ever_used, max(blocks, default=0) + 1)
        return blocks

    def lookup(self, digest: bytes) -> int | None:
        """Return the block that is registered under a digest, or None.

        The block can be evicted unless it is retained.
        """
        return self._blocks_by_digest.get(digest)

    def registered_block(self, digest: bytes) -> int:
        """Return the block that is registered under a digest. Raises KeyError if there is none."""
        return self._blocks_by_digest[digest]

    def retain(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block. The blocks must be referenced or cached."""
        for block in blocks:
            if not self._references[block]:
                del self._cached_blocks[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one reference from each block.

        The last of ``blocks`` is evicted before the first, because more contexts share the beginning of a
        prompt than its end, and a later block cannot be used without the blocks before it.
        """
        for block in reversed(list(blocks)):
            assert self._references[block] > 0, f"block {block} is released but not in use"
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._digests[block] is None:
                self._free_blocks.append(block)
            else:
                self._cached_blocks[block] = None

    def register(self, block: int, digest: bytes) -> bool:
        """Register a referenced block under the digest of its content.

        Returns:
            Whether ``block`` is now registered. False if another block is registered under the same digest.
            ``block`` then becomes free, not cached, when its last reference is removed.
        """
        assert self._references[block] > 0, f"block {block} is registered but not in use"
        assert self._digests[block] is None, f"the content of block {block} is already registered"
        if digest in self._blocks_by_digest:
            return False
        self._digests[block] = digest
        self._blocks_by_digest[digest] = block
        return True

    def forget(self) -> None:
        """Unregister the content of all blocks. Cached blocks become free; referenced blocks stay in use."""
        self._free_blocks += reversed(self._cached_blocks)
        self._cached_blocks.clear()
        self._blocks_by_digest.clear()
        self._digests = [None] * len(self._digests)

    def check_integrity(self) -> None:
        """Raise an AssertionError unless each block is in one state and the digests are consistent."""
        # The scheduler calls this method when it becomes idle. The loops over all blocks run in C to save
        # time.
        references, digests = self._references.__getitem__, self._digests.__getitem__
        num_free, num_cached = len(self._free_blocks), len(self._cached_blocks)
        num_referenced = sum(map(bool, self._references))
        assert num_free + num_referenced + num_cached == self.num_blocks, (
            f"{num_free} free + {num_referenced} referenced + {num_cached} cached blocks != {self.num_blocks}"
        )
        assert self._references[NULL_BLOCK] == 0, f"null block: {self._references[NULL_BLOCK]} references"
        assert len({NULL_BLOCK, *self._free_blocks, *self._cached_blocks}) == 1 + num_free + num_cached, (
            "a block is free twice"
        )
        num_wrong = sum(map(references, self._free_blocks)) + sum(map(references, self._cached_blocks))
        assert num_wrong == 0, f"{num_wrong} references to free or cached blocks"
        assert not any(map(digests, self._free_blocks)), "the content of a free block is known"
        assert all(map(digests, self._cached_blocks)), "the content of a cached block is not known"
        num_digests = len(self._digests) - self._digests.count(None)
        num_consistent = sum(
            map(operator.eq, map(digests, self._blocks_by_digest.values()), self._blocks_by_digest)
        )
        assert num_digests == num_consistent == len(self._blocks_by_digest), (
            f"{num_digests} blocks have a digest, {num_consistent} of {len(self._blocks_by_digest)} digests "
            "map to their block"
        )

    def _evict(self) -> int:
        block, _ = self._cached_blocks.popitem(last=False)
        digest = self._digests[block]
        assert digest is not None, f"cached block {block} has no known content"
        del self._blocks_by_digest[digest]
        self._digests[block] = None
        if self.on_evict is not None:
            self.on_evict(digest)
        if self.on_reuse is not None:
            self.on_reuse(block, digest)
        return block
