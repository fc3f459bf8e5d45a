"""Computes the tokens that the grammars of contexts allow. Functions that advance a matcher roll it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from penstock.errors import InputError
from penstock.grammar.llguidance_backend import (
    LLGuidanceMatcher,
    fill_bitmasks,
    single_allowed_token,
)
from penstock.pipelines.core import GrammarMatcher, TextContext


def grammar_bitmask(
    contexts: Sequence[TextContext],
    context_indices: np.ndarray,  # [R]
    vocab_size: int,
    drafts: Sequence[Sequence[int]] | None = None,
) -> Tensor | None:  # [R, ceil(V / 32)] int32
    """Return a bitmask of the tokens that the grammar of each row allows; None if no context has a grammar.

    The first row of a context is for its next token. Each further row is for the token after one more draft
    token.

    - Rows of contexts without a grammar, and of contexts whose output has ended, allow all tokens.
    - Rows after a draft token that the grammar rejects, or that ends the output, allow all tokens. No token
      is sampled from these rows.
    - Rows whose grammar exceeds a limit allow all tokens. The matcher's `accept_token` raises an error for
      the sampled token, and the error ends only the request of the row.
    - All other rows forbid the padding ids of the vocabulary, which have no token.

    Args:
        contexts: the contexts of the batch.
        context_indices: the index of the context of each row. The rows of a context are adjacent.
        vocab_size: number of logits.
        drafts: the draft tokens of each context.
    """
    if all(context.matcher is None for context in contexts):
        return None
    bitmask = torch.full((len(context_indices), -(-vocab_size // 32)), -1, dtype=torch.int32)
    first_rows = np.flatnonzero(np.diff(context_indices, prepend=-1)).tolist()
    indices_in_batch = [int(context_indices[first_row]) for first_row in first_rows]
    matchers = [contexts[context_index].matcher for context_index in indices_in_batch]
    rows = [
        (matcher, first_row)
        for matcher, first_row in zip(matchers, first_rows, strict=True)
        if matcher is not None and not matcher.is_terminated()
    ]
    fill_bitmasks(
        [(matcher, row) for matcher, row in rows if isinstance(matcher, LLGuidanceMatcher)], bitmask
    )
    for matcher, row in rows:
        if not isinstance(matcher, LLGuidanceMatcher):
            matcher.fill_next_token_bitmask(bitmask, row)
    for context_index, draft_matcher, first_row in zip(indices_in_batch, matchers, first_rows, strict=True):
        if (
            draft_matcher is not None
            and drafts is not None
            and drafts[context_index]
            and not draft_matcher.is_terminated()
        ):
            with _restoring_state(draft_matcher) as lookahead:
                for row, token in enumerate(drafts[context_index], first_row + 1):
                    if not lookahead.accept(token) or draft_matcher.is_terminated():
                        break
                    draft_matcher.fill_next_token_bitmask(bitmask, row)
    return bitmask


def forced_tokens(context: TextContext, max_tokens: int, vocab_size: int) -> list[int]:
    """Return the forced tokens of a context: the next tokens while its grammar allows exactly one token.

    Tokens that end the output are not included, so they are sampled as usual.

    Args:
        context: the context.
        max_tokens: maximum number of forced tokens.
        vocab_size: number of logits.
    """
    matcher = context.matcher
    if (
        matcher is None
        or max_tokens <= 0
        or matcher.is_terminated()
        or not (is_next_text_forced := _is_next_text_forced(matcher))
    ):
        return []
    stop_token_ids = set(matcher.stop_token_ids)
    tokens: list[int] = []
    mask = _new_row(vocab_size)
    with _restoring_state(matcher) as lookahead:
        while len(tokens) < max_tokens and is_next_text_forced:
            matcher.fill_next_token_bitmask(mask)
            token = single_allowed_token(_allowed_words(mask, vocab_size))
            if token is None or token in stop_token_ids or not lookahead.accept(token):
                break
            tokens.append(token)
            is_next_text_forced = _is_next_text_forced(matcher)
    return tokens


def acceptable_drafts(context: TextContext, draft: list[int]) -> list[int]:
    """Return the longest prefix of ``draft`` that the grammar accepts; ``draft`` if there is no grammar.

    A token that ends the output can only be the last token of the prefix.
    """
    matcher = context.matcher
    if matcher is None:
        return draft
    num_accepted = 0
    with _restoring_state(matcher) as lookahead:
        while (
            num_accepted < len(draft)
            and not matcher.is_terminated()
            and lookahead.accept(draft[num_accepted])
        ):
            num_accepted += 1
    return draft[:num_accepted]


@contextmanager
def matcher_lookahead(context: TextContext) -> Iterator[Callable[[int], bool]]:
    """Context manager that advances a context's matcher by draft tokens and rolls it back at the end.

    Yields a function that advances the matcher by a token. The function returns whether further tokens can
    follow: the grammar accepts the token, and the token does not end the output. Without a grammar it always
    returns True. Inside the block, `grammar_bitmask` returns the tokens that are allowed after the accepted
    draft tokens.
    """
    matcher = context.matcher
    if matcher is None:
        yield lambda token: True
        return
    with _restoring_state(matcher) as lookahead:
        yield lambda token: lookahead.accept(token) and not matcher.is_terminated()


def _new_row(vocab_size: int) -> Tensor:  # [1, ceil(V / 32)] int32
    return torch.empty((1, -(-vocab_size // 32)), dtype=torch.int32)


def _is_next_text_forced(matcher: GrammarMatcher) -> bool:
    """Return whether the grammar forces the next byte (xgrammar) or the next token (llguidance)."""
    try:
        return bool(matcher.find_jump_forward_string())
    except UnicodeDecodeError:  # incomplete UTF-8 at the end of the forced bytes: at least one byte is forced
        return True


def _allowed_words(row: Tensor, vocab_size: int) -> np.ndarray:  # [ceil(V / 32)] uint32
    """Return a row of a bitmask as unsigned words. Clears the bits after the vocabulary."""
    words: np.ndarray = row[0].numpy().view(np.uint32)
    if vocab_size % 32:
        words[-1] &= np.uint32((1 << vocab_size % 32) - 1)
    return words


class _Lookahead:
    """Advances a matcher and counts the accepted tokens, so that they can be rolled back."""

    def __init__(self, matcher: GrammarMatcher) -> None:
        self._matcher = matcher
        self.num_accepted = 0

    def accept(self, token: int) -> bool:
        try:
            is_accepted = bool(self._matcher.accept_token(token))
        except InputError:
            # A limit was exceeded. The matcher raises the error again when the context receives a token.
            return False
        self.num_accepted += is_accepted
        return is_accepted


@contextmanager
def _restoring_state(matcher: GrammarMatcher) -> Iterator[_Lookahead]:
    lookahead = _Lookahead(matcher)
    try:
        yield lookahead
    finally:
        if lookahead.num_accepted:
            matcher.rollback(lookahead.num_accepted)
