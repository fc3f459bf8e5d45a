"""Computes which tokens a context's grammar allows next, without changing the state of its matcher."""

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
    only_token,
)
from penstock.pipelines.core import GrammarMatcher, TextContext


def grammar_bitmask(
    contexts: Sequence[TextContext],
    sequences: np.ndarray,  # [R]: context index of each row; rows of a context are adjacent
    vocabulary: int,
    drafts: Sequence[Sequence[int]] | None = None,
) -> Tensor | None:  # [R, ceil(V / 32)] int32
    """Return a bitmask of the tokens that each row's grammar allows next; None if no context has a grammar.

    The first row of a context is for its next token, and each further row follows one more draft token.
    Rows with a grammar forbid ids without a token (padding of the vocabulary). Rows after a draft that the
    grammar refuses or that ends the output are never sampled and allow all tokens. Rows whose grammar
    exceeds a limit also allow all tokens: the matcher raises when it receives the token, which ends only that
    request.
    """
    if all(context.matcher is None for context in contexts):
        return None
    bitmask = torch.full((len(sequences), -(-vocabulary // 32)), -1, dtype=torch.int32)
    firsts = np.flatnonzero(np.diff(sequences, prepend=-1)).tolist()
    owners = [int(sequences[first]) for first in firsts]
    matchers = [contexts[owner].matcher for owner in owners]
    rows = [
        (matcher, first)
        for matcher, first in zip(matchers, firsts, strict=True)
        if matcher is not None and not matcher.is_terminated()
    ]
    fill_bitmasks(
        [(matcher, row) for matcher, row in rows if isinstance(matcher, LLGuidanceMatcher)], bitmask
    )
    for matcher, row in rows:
        if not isinstance(matcher, LLGuidanceMatcher):
            matcher.fill_next_token_bitmask(bitmask, row)
    for owner, walked, first in zip(owners, matchers, firsts, strict=True):
        if walked is not None and drafts is not None and drafts[owner] and not walked.is_terminated():
            with _restored(walked) as walk:
                for row, token in enumerate(drafts[owner], first + 1):
                    if not walk.accept(token) or walked.is_terminated():
                        break
                    walked.fill_next_token_bitmask(bitmask, row)
    return bitmask


def forced_tokens(context: TextContext, limit: int, vocabulary: int) -> list[int]:
    """Return the next tokens of a context while its grammar allows exactly one; at most ``limit``.

    They never contain a token that ends the output, which is sampled as usual. ``vocabulary`` is the number
    of logits.
    """
    matcher = context.matcher
    if matcher is None or limit <= 0 or matcher.is_terminated() or not (is_certain := _is_certain(matcher)):
        return []
    ends = set(matcher.stop_token_ids)
    tokens: list[int] = []
    mask = _new_row(vocabulary)
    with _restored(matcher) as walk:
        while len(tokens) < limit and is_certain:
            matcher.fill_next_token_bitmask(mask)
            token = only_token(_allowed_words(mask, vocabulary))
            if token is None or token in ends or not walk.accept(token):
                break
            tokens.append(token)
            is_certain = _is_certain(matcher)
    return tokens


def acceptable_drafts(context: TextContext, draft: list[int]) -> list[int]:
    """Return the longest prefix of ``draft`` that the context's grammar accepts; all of it without a grammar.

    A token that ends the output can only be the last one.
    """
    matcher = context.matcher
    if matcher is None:
        return draft
    accepted = 0
    with _restored(matcher) as walk:
        while accepted < len(draft) and not matcher.is_terminated() and walk.accept(draft[accepted]):
            accepted += 1
    return draft[:accepted]


@contextmanager
def matcher_lookahead(context: TextContext) -> Iterator[Callable[[int], bool]]:
    """Advance a context's matcher by draft tokens, and roll it back at the end.

    Yields a function that accepts the next token and returns whether further tokens can follow it: the
    grammar accepts the token and it does not end the output. Without a grammar the result is always True.
    Inside the block, `grammar_bitmask` returns the tokens that can follow the accepted ones.
    """
    matcher = context.matcher
    if matcher is None:
        yield lambda token: True
        return
    with _restored(matcher) as walk:
        yield lambda token: walk.accept(token) and not matcher.is_terminated()


def _new_row(vocabulary: int) -> Tensor:  # [1, ceil(V / 32)] int32
    return torch.empty((1, -(-vocabulary // 32)), dtype=torch.int32)


def _is_certain(matcher: GrammarMatcher) -> bool:
    """Return whether only one next byte is possible. This cheap test excludes most positions."""
    try:
        return bool(matcher.find_jump_forward_string())
    except UnicodeDecodeError:  # the forced bytes end within a character
        return True


def _allowed_words(row: Tensor, vocabulary: int) -> np.ndarray:  # [ceil(V / 32)] uint32
    """Return a row as words, with the bits after the vocabulary cleared."""
    words: np.ndarray = row[0].numpy().view(np.uint32)
    if vocabulary % 32:
        words[-1] &= np.uint32((1 << vocabulary % 32) - 1)
    return words


class _Walk:
    """Counts the tokens that a matcher has accepted, for a later rollback."""

    def __init__(self, matcher: GrammarMatcher) -> None:
        self._matcher = matcher
        self.length = 0

    def accept(self, token: int) -> bool:
        try:
            accepted = bool(self._matcher.accept_token(token))
        except InputError:  # raised again when the context receives its next token
            return False
        self.length += accepted
        return accepted


@contextmanager
def _restored(matcher: GrammarMatcher) -> Iterator[_Walk]:
    walk = _Walk(matcher)
    try:
        yield walk
    finally:
        if walk.length:
            matcher.rollback(walk.length)
