"""The blocks of one group of layers: free, referenced, or cached.

Each block except the null block is in exactly one of three states::

                      allocate                            register(block, digest)
        +----------+ ---------> +---------------------+ ------------------------> found by `lookup`
        |   free   |            |  referenced (n > 0)  |
        |  (stack) | <--------- |                     | <-----+
        +----------+  release,  +---------------------+       | retain
             ^        unknown              | release,         |
             |        content              v known content    |
             |                  +---------------------+       |
             +----------------- |   cached (n = 0)    | ------+
               evict: the least |  oldest  ...  newest |
               recently used    +---------------------+

Block 0 is the null block. It pads block tables and stands for blocks before a window. It is never allocated
and has no references and no content. Allocation is deterministic: the same calls give the same blocks.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable

from penstock.errors import InsufficientBlocksError

NULL_BLOCK = 0


class BlockPool:
    """Allocates blocks ``1 .. num_blocks - 1``, counts references, and finds blocks by their content."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, f"a pool has at least the null block, not {num_blocks} blocks"
        self._references = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, 0, -1))
        self._num_used = 1
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.on_evict: Callable[[bytes], None] | None = None
        """Function that is called with the digest of each evicted block."""
        self.on_reuse: Callable[[int, bytes], None] | None = None
        """Function that is called with each evicted block and its digest, before the block gets new
        content."""

    @property
    def num_blocks(self) -> int:
        """The number of blocks in all states, without the null block."""
        return len(self._references) - 1

    @property
    def num_free(self) -> int:
        """The number of blocks that can be allocated now, including cached blocks."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """The number of blocks that have been allocated at least once, with the null block.

        These are the blocks below this number: new blocks are allocated in ascending order.
        """
        return self._num_used

    @property
    def num_cached(self) -> int:
        """The number of blocks with known content and no references."""
        return len(self._cached)

    def references(self, block: int) -> int:
        """Return the number of block tables that hold ``block``."""
        return self._references[block]

    def all_references(self) -> list[int]:
        """Return the number of references of every block, including the null block."""
        return list(self._references)

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` blocks without known content, with one reference each.

        Raises:
            InsufficientBlocksError: fewer blocks are free. No block is allocated.
        """
        if count > self.num_free:
            raise InsufficientBlocksError(count, self.num_free, self.num_blocks)
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        self._num_used = max(self._num_used, max(blocks, default=0) + 1)
        return blocks

    def lookup(self, digest: bytes) -> int | None:
        """Return the block with this digest, or None. The block can be evicted unless it is retained."""
        return self._block_of.get(digest)

    def find(self, digest: bytes) -> int:
        """Return the block with this digest, which must be registered."""
        return self._block_of[digest]

    def retain(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block. The blocks must be referenced or cached."""
        for block in blocks:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one reference from each block.

        Of the blocks in one call, the last block is evicted first. The beginning of a prompt is shared more
        often than its end, and the end cannot be used without the beginning.
        """
        for block in reversed(list(blocks)):
            assert self._references[block] > 0, f"block {block} is released but not in use"
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._digests[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def register(self, block: int, digest: bytes) -> bool:
        """Register a referenced block under the digest of its content.

        Returns:
            Whether ``block`` is now registered. False if another block is registered with the same content;
            ``block`` then becomes free when its last reference is removed.
        """
        assert self._references[block] > 0, f"block {block} is registered but not in use"
        assert self._digests[block] is None, f"block {block} has a known content already"
        if digest in self._block_of:
            return False
        self._digests[block] = digest
        self._block_of[digest] = block
        return True

    def forget(self) -> None:
        """Unregister the content of all blocks. Cached blocks become free; referenced blocks stay in use."""
        self._free += reversed(self._cached)
        self._cached.clear()
        self._block_of.clear()
        self._digests = [None] * len(self._digests)

    def check_integrity(self) -> None:
        """Raise an AssertionError with the block counts unless each block is in exactly one state."""
        # The scheduler calls this when it becomes idle. The loops over all blocks run in C, to be fast.
        references, digests = self._references.__getitem__, self._digests.__getitem__
        free, cached = len(self._free), len(self._cached)
        referenced = sum(map(bool, self._references))
        assert free + referenced + cached == self.num_blocks, (
            f"{free} free + {referenced} referenced + {cached} cached blocks != {self.num_blocks}"
        )
        assert self._references[NULL_BLOCK] == 0, f"null block: {self._references[NULL_BLOCK]} references"
        assert len({NULL_BLOCK, *self._free, *self._cached}) == 1 + free + cached, "a block is free twice"
        wrong = sum(map(references, self._free)) + sum(map(references, self._cached))
        assert wrong == 0, f"{wrong} references to free or cached blocks"
        assert not any(map(digests, self._free)), "the content of a free block is known"
        assert all(map(digests, self._cached)), "the content of a cached block is not known"
        known = len(self._digests) - self._digests.count(None)
        found = sum(map(operator.eq, map(digests, self._block_of.values()), self._block_of))
        assert known == found == len(self._block_of), (
            f"{known} blocks have a digest, {found} of {len(self._block_of)} digests map to their block"
        )

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        digest = self._digests[block]
        assert digest is not None, f"cached block {block} has no known content"
        del self._block_of[digest]
        self._digests[block] = None
        if self.on_evict is not None:
            self.on_evict(digest)
        if self.on_reuse is not None:
            self.on_reuse(block, digest)
        return block
