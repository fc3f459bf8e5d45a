"""Computes the number of decode steps of a batch, and reserves their cache blocks.

`reserve_steps` determines how many steps a batch runs, up to the requested number. The scheduler calls
`reserve_steps` while it builds a batch, and passes a `ReservedBatch` to the pipeline. For a batch that is not
a `ReservedBatch`, the pipeline calls `reserve_steps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from penstock.errors import InsufficientBlocksError
from penstock.kv_cache.interface import KVCache, restart
from penstock.pipelines.core import InputContext

ContextT = TypeVar("ContextT", bound=InputContext)


class ReservedBatch(dict[str, ContextT]):
    """Contexts by request id that are claimed, not stale, and have the blocks of all their steps."""


def claim(kv: KVCache, context: InputContext) -> None:
    """Claim a context. Restart it first if its keys are stale."""
    if kv.is_stale(context):
        restart(kv, context)
    kv.claim(context)


def reserve_steps(kv: KVCache, contexts: Sequence[InputContext], num_steps: int) -> int:
    """Reserve cache blocks for the next steps of a batch and return how many steps the batch can run.

    The result is 1 if a context must be checked after each token or computes a chunk of its prompt, or if the
    cache has too few free blocks for all steps of all contexts. The result does not exceed `tokens_left` of
    any context, but is at least 1.

    Args:
        kv: the cache.
        contexts: the contexts, claimed, with ``active_idx`` set.
        num_steps: the maximum number of steps, at least 1.

    Raises:
        InsufficientBlocksError: the free blocks do not suffice for one step. The contexts before the first
            one without enough blocks keep their new blocks.
    """
    if num_steps > 1:
        num_steps = _max_steps(kv, contexts, num_steps)
    for context in contexts:
        kv.reserve(context, num_steps - 1)
    return num_steps


def reserve_drafts(kv: KVCache, context: InputContext, num_drafts: int) -> int:
    """Reserve cache blocks for drafts of a context and return how many drafts have blocks.

    The blocks of the active tokens must be reserved already. The number of drafts is halved until the cache
    has enough free blocks.
    """
    while num_drafts:
        try:
            kv.reserve(context, num_drafts)
        except InsufficientBlocksError:
            num_drafts //= 2
        else:
            break
    return num_drafts


def tokens_left(kv: KVCache, context: InputContext) -> int | None:
    """Return how many tokens a context may generate in one call of a pipeline; None without a limit."""
    steps, max_length = kv.steps_left(context), context.max_length
    if max_length is None:
        return steps
    num_tokens = max_length - context.current_length
    return num_tokens if steps is None else min(num_tokens, steps)


def _max_steps(kv: KVCache, contexts: Sequence[InputContext], num_steps: int) -> int:
    for context in contexts:
        if _needs_single_steps(context):
            return 1
        num_tokens = tokens_left(kv, context)
        if num_tokens is not None and num_tokens < num_steps:
            num_steps = num_tokens
    if num_steps <= 1:
        return 1
    num_missing = sum([kv.num_missing_blocks(context, num_steps - 1) for context in contexts])
    return 1 if num_missing > kv.num_free_blocks else num_steps


def _needs_single_steps(context: InputContext) -> bool:
    """Return whether a context must be checked after each token, or computes a chunk of a prompt."""
    params = context.sampling_params
    return (
        context.active_idx < context.end_idx
        or context.matcher is not None
        or bool(context.log_probabilities)
        or params.needs_penalties
        or bool(params.banned_sequences)
    )
