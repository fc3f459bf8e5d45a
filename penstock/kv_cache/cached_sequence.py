"""`CachedSequence`: the blocks and the state of one context in the cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.kv_cache.sequence_states import SequenceState


@dataclass(slots=True)
class CachedSequence:
    """The cache state of a claimed context."""

    request_id: str
    slot: int
    num_dropped: list[int]  # per group: number of table entries before the window, which hold the null block
    regime: int  # regime of the keys, see `KVCacheSpec.regime`
    root: bytes | None = None  # parent of the first block's digest; None if the blocks must not be shared
    num_blocks: int = 0  # number of blocks in each block table
    num_committed: int = 0  # number of committed blocks, which are read-only
    digests: list[bytes] = field(default_factory=list)  # digests of the committed blocks
    in_flight: list[bytes] = field(default_factory=list)  # digests of blocks being computed, last block first
    state: SequenceState | None = None  # only for a model with `KVCacheSpec.states`

    def digest(self, num_blocks: int) -> bytes | None:
        """Return the digest of the last of the first ``num_blocks`` blocks.

        Returns None if it is unknown, or if the blocks must not be shared.
        """
        num_known = len(self.digests)
        if self.root is None or not 0 < num_blocks <= num_known + len(self.in_flight):
            return None
        return (
            self.digests[num_blocks - 1]
            if num_blocks <= num_known
            else self.in_flight[num_known - num_blocks]
        )
