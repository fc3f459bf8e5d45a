"""The interface of a KV cache for schedulers and pipelines.

The life of a context in a cache::

    claim -> reserve -> (forward) -> commit -> reserve -> ... -> release
      |         |                      |                           |
      |         |                      |                           +- full blocks stay in the prefix cache
      |         |                      +- full blocks become shareable; blocks before windows are freed
      |         +- allocates blocks for the rows of the next step
      +- assigns a slot and the cached blocks of the prefix

If the keys of a context are stale, `restart` follows commit, and the context is claimed again.

Numbers of blocks do not include the null block.
"""

from __future__ import annotations

from typing import Protocol

from penstock.pipelines.core import InputContext
from penstock.pipelines.core.cache_events import CacheEvent


class KVCache(Protocol):
    """Assigns blocks of the KV cache to contexts. Only one thread may call the methods."""

    max_length: int | None
    """Maximum length of a sequence that the model accepts; None without a limit. Set by the pipeline."""

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the group of layers with the fewest blocks."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that can be allocated now, in the group with the fewest such blocks."""
        ...

    @property
    def num_cached_blocks(self) -> int:
        """How many of the `num_free_blocks` have known content. `reserve` allocates these blocks last."""
        ...

    @property
    def prefix_limits(self) -> tuple[int, ...] | None:
        """Ascending sequence lengths. Contexts on different sides of a limit have different block digests.

        None means that prefix caching is disabled.
        """
        ...

    def fits(self, num_tokens: int, chunk_size: int | None = None) -> bool:
        """Return whether a sequence of ``num_tokens`` fits into the empty cache.

        Args:
            num_tokens: the final length of the sequence.
            chunk_size: the maximum number of tokens that a step computes; None for no limit.
        """
        ...

    def admits(self, context: InputContext, *, chunk_size: int | None = None, headroom: int = 0) -> bool:
        """Return whether free blocks and recurrent states suffice for all tokens of an unclaimed context.

        Args:
            context: the context. It needs no free blocks for the part of its prefix that claimed contexts
                hold.
            chunk_size: the maximum number of tokens that a step computes; None for no limit.
            headroom: the number of blocks that must remain free.
        """
        ...

    def claim(self, context: InputContext) -> None:
        """Assign to a context a slot and the cached blocks of its prefix. Does nothing for a claimed context.

        ``start_idx`` moves to the end of the cached prefix. The cached prefix consists of full blocks. It
        never includes the last active token, whose logits are needed. If the context has no generated tokens,
        ``num_cached_tokens`` is set to the length of the cached prefix. When a context that was preempted
        during its prompt is claimed again, the cached prefix can contain blocks that this context computed.
        The caller must then restore the ``num_cached_tokens`` of the first claim.

        Raises:
            InsufficientBlocksError: the model has recurrent states, and none is free.
        """
        ...

    def reserve(self, context: InputContext, lookahead: int = 0) -> None:
        """Assign the missing blocks for the tokens up to ``active_idx + lookahead``.

        If a context was rolled back into its committed tokens, ``start_idx`` moves down to a block boundary.
        It moves to 0 if blocks that a window needs were freed, or if the model has recurrent states. Blocks
        that other contexts can read are therefore never written.

        Raises:
            InsufficientBlocksError: a group of layers has too few free blocks. No block is assigned.
        """
        ...

    def num_missing_blocks(self, context: InputContext, lookahead: int = 0) -> int:
        """Return the maximum number of blocks that ``reserve(context, lookahead)`` allocates in a group."""
        ...

    def steps_left(self, context: InputContext) -> int | None:
        """Return how many tokens can be appended until the keys are stale or ``max_length`` is reached.

        None means that there is no limit.
        """
        ...

    def commit(self, context: InputContext) -> None:
        """Record that a forward has computed the tokens up to ``start_idx``.

        With prefix caching, other contexts can then find the full blocks. Blocks before the window of a layer
        are freed.
        """
        ...

    def fork(self, parent: InputContext, child: InputContext) -> None:
        """Commit ``parent``, and share its computed blocks with ``child``.

        The tokens of the child must begin with the computed tokens of the parent, up to the parent's
        ``start_idx``.

        Full blocks are shared, and the last partial block is copied. The ``start_idx`` of the child becomes
        the parent's ``start_idx``.

        Raises:
            InsufficientBlocksError: no block is free for the copy, or the model has recurrent states and none
                is free. The child is not claimed.
        """
        ...

    def release(self, context: InputContext) -> None:
        """Free the slot and the blocks of a context, if any, and drop the digests of its tokens.

        The caller must call this method before ``context.reset()``, and also when a waiting context is
        cancelled, because `waits_for` and `admits` store the digests of waiting contexts.
        """
        ...

    def waits_for(self, context: InputContext) -> bool:
        """Return whether a claimed context is computing the next block that ``context`` needs.

        ``context`` is not claimed yet. Waiting for the block takes less time than computing it twice. The
        wait ends when the block is committed or when the context that computes it is released.
        """
        ...

    def is_stale(self, context: InputContext) -> bool:
        """Return whether the cached keys of a context are invalid (stale) for its next token.

        The keys are invalid if the length of the context has crossed a limit of `KVCacheSpec.key_limits`
        since the context was claimed. For a forked context, the length at the claim of the parent counts.
        All tokens of the context must then be computed again, see `restart`.
        """
        ...

    def forget_prefixes(self) -> None:
        """Remove all blocks from the prefix index. Claimed contexts keep their blocks."""
        ...

    def record_events(self) -> None:
        """Record the events of the prefix cache from now on, for `take_events`."""
        ...

    def take_events(self) -> list[CacheEvent]:
        """Return the events since the last call; none before `record_events`."""
        ...

    def discard_storage(self) -> None:
        """Return the memory of all blocks to the system, and forget their content. No context may be claimed.

        The first write to a block allocates its memory again.

        Raises:
            UnsupportedFeatureError: the memory of the device cannot be returned.
        """
        ...

    def prefault_next_pages(self) -> bool:
        """Allocate memory pages of some blocks that are used next. An idle worker calls this method.

        Returns:
            Whether pages may remain to be allocated.
        """
        ...

    def check_integrity(self) -> None:
        """Raise an AssertionError unless the counts of blocks and references are consistent.

        Free, referenced and cached blocks must add up to all blocks. The reference counts of the blocks must
        equal the numbers of block tables that contain them.
        """
        ...


class NullKVCache:
    """The cache of models without a KV cache: every context fits, and no block is assigned."""

    def __init__(self) -> None:
        self.max_length: int | None = None

    @property
    def num_blocks(self) -> int:
        return 0

    @property
    def num_free_blocks(self) -> int:
        return 0

    @property
    def num_cached_blocks(self) -> int:
        return 0

    @property
    def prefix_limits(self) -> tuple[int, ...] | None:
        return None

    def fits(self, num_tokens: int, chunk_size: int | None = None) -> bool:
        return True

    def admits(self, context: InputContext, *, chunk_size: int | None = None, headroom: int = 0) -> bool:
        return True

    def claim(self, context: InputContext) -> None:
        return

    def reserve(self, context: InputContext, lookahead: int = 0) -> None:
        return

    def num_missing_blocks(self, context: InputContext, lookahead: int = 0) -> int:
        return 0

    def steps_left(self, context: InputContext) -> int | None:
        return None if self.max_length is None else self.max_length - context.current_length

    def commit(self, context: InputContext) -> None:
        return

    def fork(self, parent: InputContext, child: InputContext) -> None:
        return

    def release(self, context: InputContext) -> None:
        context.unassign_from_cache()

    def waits_for(self, context: InputContext) -> bool:
        return False

    def is_stale(self, context: InputContext) -> bool:
        return False

    def forget_prefixes(self) -> None:
        return

    def record_events(self) -> None:
        return

    def take_events(self) -> list[CacheEvent]:
        return []

    def discard_storage(self) -> None:
        return

    def prefault_next_pages(self) -> bool:
        return False

    def check_integrity(self) -> None:
        return


def restart(kv: KVCache, context: InputContext) -> None:
    """Release and reset a context that is preempted or stale, so that later steps compute its tokens again.

    Tokens of a cached prefix are not computed again.
    """
    kv.release(context)
    context.reset()
    context.set_token_indices(active_idx=context.end_idx)  # chunked prefill sets an earlier index
