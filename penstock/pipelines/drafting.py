"""Drafts of a batch: their maximum number, their tokens, and the statistics of their verification.

A grammar forces the tokens of a draft, or a `DraftProposer` proposes them.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.grammar import acceptable_drafts, forced_tokens
from penstock.kv_cache import KVCache, tokens_left
from penstock.memory import MAX_DRAFT_ROWS
from penstock.pipelines.context_rules import appends_forced_tokens
from penstock.pipelines.core import TextContext
from penstock.pipelines.speculative import DraftLengthPolicy, DraftProposer, SpeculationStats, known_tokens

_MAX_FORCED_TOKENS = 64
"""Maximum number of forced tokens of one context in one step."""


def draft_limits(contexts: Sequence[TextContext], kv: KVCache, max_rows: int) -> list[int]:
    """Return the maximum number of drafts of each context.

    The unused rows of the step, at most `MAX_DRAFT_ROWS`, are divided evenly among the contexts. A context
    also gets fewer drafts than the tokens it may still generate. A context whose prompt continues in the next
    step gets 0.

    Args:
        contexts: the batch.
        kv: the cache, which limits the length of a context.
        max_rows: the maximum number of rows of a step in the memory plan.
    """
    num_rows = sum(context.active_length for context in contexts)
    num_unused_rows = max(max_rows - num_rows, 0)
    max_drafts = min(num_unused_rows, MAX_DRAFT_ROWS) // len(contexts)
    return [
        0 if context.active_idx < context.end_idx else max(min(_tokens_left(context, kv) - 1, max_drafts), 0)
        for context in contexts
    ]


def draft_tokens(
    contexts: Sequence[TextContext],
    limits: Sequence[int],
    proposer: DraftProposer | None,
    draft_lengths: DraftLengthPolicy | None,
    vocab_size: int,
) -> tuple[list[list[int]], list[bool]]:
    """Return for each context its drafts, and whether its grammar forces them.

    Args:
        contexts: the batch.
        limits: the maximum number of drafts of each context.
        proposer: drafts tokens for contexts whose grammar forces no token; None disables these drafts.
        draft_lengths: limits the drafts of the proposer further; None sets no further limit.
        vocab_size: number of logits V; 0 before the first forward, when V is not known yet.
    """
    drafts: list[list[int]] = [[] for _ in contexts]
    for index, (context, limit) in enumerate(zip(contexts, limits, strict=True)):
        # After the first token, `append_forced` has already appended the tokens that the grammar forces.
        has_appended = appends_forced_tokens(context) and len(context.generated_tokens)
        if context.matcher is not None and vocab_size and not has_appended:
            drafts[index] = forced_tokens(context, min(limit, _MAX_FORCED_TOKENS), vocab_size)
    is_forced = [bool(draft) for draft in drafts]
    if proposer is None:
        return drafts, is_forced
    limits = [0 if forced else limit for limit, forced in zip(limits, is_forced, strict=True)]
    lengths = limits if draft_lengths is None else draft_lengths.lengths(contexts, limits)
    proposals = proposer.propose(contexts, lengths)
    for index, (context, draft) in enumerate(zip(contexts, proposals, strict=True)):
        if not is_forced[index]:
            known_drafts = known_tokens(draft[: lengths[index]], vocab_size)
            drafts[index] = acceptable_drafts(context, known_drafts)
    return drafts, is_forced


def append_forced(context: TextContext, kv: KVCache, vocab_size: int) -> int:
    """Append tokens that the grammar forces, and return their number. The next step computes them.

    Appends nothing if the context has ended or computes a chunk of a prompt, if `appends_forced_tokens` is
    false for the context, or if ``vocab_size`` is 0 (not known yet).
    """
    is_done_or_chunk = context.generation_status.is_done or context.active_idx < context.end_idx
    if not appends_forced_tokens(context) or is_done_or_chunk or not vocab_size:
        return 0
    limit = _tokens_left(context, kv) - 1  # the token that reaches the maximum length must be sampled
    num_forced = 0
    for token in forced_tokens(context, min(limit, _MAX_FORCED_TOKENS), vocab_size):
        context.jump_ahead(token)
        num_forced += 1
        if context.generation_status.is_done:
            break
    return num_forced


def report_drafts(
    contexts: Sequence[TextContext],
    drafts: Sequence[list[int]],
    is_forced: Sequence[bool],
    num_matching: Sequence[int],
    stats: SpeculationStats,
    observers: Sequence[DraftProposer | DraftLengthPolicy],
) -> None:
    """Count forced tokens and drafts, and report the drafts to the proposer and the length policy.

    Args:
        contexts: the batch, after the tokens of the step were appended.
        drafts: the verified drafts of each context.
        is_forced: for each context whether its grammar forced the drafts.
        num_matching: the number of drafts of each context that equal the sampled tokens.
        stats: the counters to add to.
        observers: the proposer and the length policy, if any.
    """
    stats.num_forced += sum(count for count, forced in zip(num_matching, is_forced, strict=True) if forced)
    drafts = [[] if forced else draft for draft, forced in zip(drafts, is_forced, strict=True)]
    num_accepted = [count if draft else 0 for count, draft in zip(num_matching, drafts, strict=True)]
    stats.count(drafts, num_accepted)
    for observer in observers:
        observer.observe(contexts, drafts, num_accepted)


def _tokens_left(context: TextContext, kv: KVCache) -> int:
    """Return the maximum number of tokens, including accepted drafts, that a call may add to a context."""
    num_tokens = tokens_left(kv, context)
    assert num_tokens is not None, "the pipeline limits the length of sequences"
    return num_tokens
