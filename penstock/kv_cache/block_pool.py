"""Which blocks of one group of layers are free, in use, or kept because their content is known.

Each block but the null block is in exactly one of three places::

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

Block 0 is the null block: it pads block tables and stands for blocks behind a window. It is never handed
out, has no references and no content. The same calls give the same blocks, on every machine.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterable

from penstock.errors import InsufficientBlocksError

NULL_BLOCK = 0


class BlockPool:
    """Hands out blocks ``1 .. num_blocks - 1``, counts references, and finds blocks by their content."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, f"a pool has at least the null block, not {num_blocks} blocks"
        self._references = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        """The blocks that can be handed out, in whatever state they are."""
        return len(self._references) - 1

    @property
    def num_free(self) -> int:
        """The blocks that can be had now, the cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """The blocks of known content to which nobody refers."""
        return len(self._cached)

    def references(self, block: int) -> int:
        """How many block tables hold ``block``."""
        return self._references[block]

    def all_references(self) -> list[int]:
        """The same of every block, the null block included."""
        return list(self._references)

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` blocks of no known content, with one reference each.

        Raises:
            InsufficientBlocksError: there are fewer; none is taken.
        """
        if count > self.num_free:
            raise InsufficientBlocksError(count, self.num_free, self.num_blocks)
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def lookup(self, digest: bytes) -> int | None:
        """The block whose content has this digest. It may be evicted unless it is retained."""
        return self._block_of.get(digest)

    def find(self, digest: bytes) -> int:
        """Like `lookup`, of a content that is known."""
        return self._block_of[digest]

    def retain(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each block, which is referenced or cached."""
        for block in blocks:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Takes one reference from each block.

        Of blocks released together the last ones are evicted first: the beginning of a prompt is shared
        more often than its end, and of no use is the end alone.
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
        """Makes a referenced block known by its content.

        Returns:
            Whether it is now. Where another block of the same content is known already that one stays, and
            ``block`` is freed like any other when its last reference goes.
        """
        assert self._references[block] > 0, f"block {block} is registered but not in use"
        assert self._digests[block] is None, f"block {block} has a known content already"
        if digest in self._block_of:
            return False
        self._digests[block] = digest
        self._block_of[digest] = block
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError, with the numbers, unless each block is in exactly one place."""
        # Runs whenever a server falls idle, over all blocks: loops in C, no statement a block.
        references, digests = self._references.__getitem__, self._digests.__getitem__
        free, cached = len(self._free), len(self._cached)
        referenced = sum(map(bool, self._references))
        assert free + referenced + cached == self.num_blocks, (
            f"{free} free + {referenced} referenced + {cached} cached blocks != {self.num_blocks}"
        )
        assert self._references[NULL_BLOCK] == 0, f"null block: {self._references[NULL_BLOCK]} references"
        assert len({NULL_BLOCK, *self._free, *self._cached}) == 1 + free + cached, "a block is free twice"
        wrong = sum(map(references, self._free)) + sum(map(references, self._cached))
        assert wrong == 0, f"{wrong} references to blocks that can be handed out"
        assert not any(map(digests, self._free)), "the content of a free block is known"
        assert all(map(digests, self._cached)), "the content of a cached block is not known"
        known = len(self._digests) - self._digests.count(None)
        found = sum(map(operator.eq, map(digests, self._block_of.values()), self._block_of))
        assert known == found == len(self._block_of), (
            f"{known} blocks know their content, {found} of {len(self._block_of)} are found by it"
        )

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        digest = self._digests[block]
        assert digest is not None, f"cached block {block} has no known content"
        del self._block_of[digest]
        self._digests[block] = None
        return block
