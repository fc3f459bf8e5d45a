"""What schedulers and pipelines ask of a KV cache.

The life of a context in a cache::

    claim -> reserve -> (forward) -> commit -> reserve -> ... -> release
      |         |                      |                           |
      |         |                      |                           +- blocks of known content stay cached
      |         |                      +- full blocks become known to others; those behind windows are freed
      |         +- blocks for the rows of the next step
      +- a slot, and whatever blocks of its beginning are known already

A context whose keys are stale goes from commit back to claim, through `restart`.

All numbers of blocks leave out the null block.
"""

from __future__ import annotations

from typing import Protocol

from penstock.pipelines.core import InputContext


class KVCache(Protocol):
    """Who may keep keys and values in how many blocks. Called by one thread."""

    max_length: int | None
    """Length of the longest sequence that the model accepts, None for any. Set by the pipeline."""

    @property
    def num_blocks(self) -> int:
        """The blocks there are, in the group of layers that has the fewest."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """The blocks that can be had now, in the group of layers that has the fewest to give."""
        ...

    @property
    def num_cached_blocks(self) -> int:
        """Those of `num_free_blocks` whose content is known: they are the last to be had."""
        ...

    def fits(self, num_tokens: int, chunk_size: int | None = None) -> bool:
        """Whether a sequence of ``num_tokens`` could be kept if it were the only one.

        Args:
            num_tokens: how long the sequence gets.
            chunk_size: it is computed at most so many tokens at a time; None: all at once.
        """
        ...

    def admits(self, context: InputContext, *, chunk_size: int | None = None, headroom: int = 0) -> bool:
        """Whether all tokens that an unclaimed context has now could be kept now.

        Args:
            context: the context; what is cached of its beginning is counted in.
            chunk_size: it is computed at most so many tokens at a time; None: all at once.
            headroom: blocks that must be left over for others.
        """
        ...

    def claim(self, context: InputContext) -> None:
        """Gives a context its slot and the cached blocks of its beginning. A no-op where it has them.

        ``start_idx`` moves to the end of the cached beginning: full blocks only, and at least the last
        active token is left to compute. ``num_cached_tokens`` says how far it moved, if nothing has been
        generated yet; whoever preempts a prompt half-computed and claims it again finds its own blocks, and
        puts the first value back.
        """
        ...

    def reserve(self, context: InputContext, lookahead: int = 0) -> None:
        """Provides blocks for the tokens up to ``active_idx + lookahead``. A no-op where they are there.

        A context that was rolled back into what is committed goes on at the block boundary before:
        ``start_idx`` moves down to it, so that blocks which others may read are never written to.

        Raises:
            InsufficientBlocksError: there are too few in some group of layers; none is taken.
        """
        ...

    def num_missing_blocks(self, context: InputContext, lookahead: int = 0) -> int:
        """Return an upper bound of the blocks that ``reserve(context, lookahead)`` would take."""
        ...

    def steps_left(self, context: InputContext) -> int | None:
        """Return how many tokens a context may gain until its keys are stale or it is ``max_length`` long.

        None stands for any number.
        """
        ...

    def commit(self, context: InputContext) -> None:
        """Takes note of what a forward has computed, up to ``start_idx``.

        Full blocks can be found by other contexts from now on; those behind a window are freed.
        """
        ...

    def fork(self, parent: InputContext, child: InputContext) -> None:
        """Gives ``child``, whose tokens begin like those of ``parent``, all that is computed of it.

        Full blocks are shared, the last partial one is copied; ``start_idx`` becomes the parent's.

        Raises:
            InsufficientBlocksError: there is no block for the copy; nothing has changed.
        """
        ...

    def release(self, context: InputContext) -> None:
        """Takes slot and blocks back; a no-op where it has none. Comes before ``context.reset()``.

        Whoever gives a waiting context up calls this too: what `waits_for` and `admits` remember of it goes.
        """
        ...

    def waits_for(self, context: InputContext) -> bool:
        """Whether a claimed context is about to compute the next block that an unclaimed one needs.

        Then waiting for it is cheaper than computing the same again. It ends when that block is committed,
        or its owner released.
        """
        ...

    def is_stale(self, context: InputContext) -> bool:
        """Return whether the keys of a context are of no use for its next token.

        They are where it was claimed, or forked, at a length on the other side of a limit
        (`KVCacheSpec.key_limits`). Then all of its tokens must be computed again: see `restart`.
        """
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError, with the numbers, unless free + referenced + cached blocks are all there
        are, and references are those of the block tables."""
        ...


class NullKVCache:
    """The cache of models that keep none: everything fits, nothing is held."""

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

    def check_integrity(self) -> None:
        return


def restart(kv: KVCache, context: InputContext) -> None:
    """Makes all tokens of a context a prompt to compute again: it was evicted, or its keys are stale."""
    kv.release(context)
    context.reset()
    context.set_token_indices(active_idx=context.end_idx)  # a chunk may have been cut off it
