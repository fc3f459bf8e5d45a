"""Which tokens a context's grammar allows next: asked of its matcher, which is left where it was."""

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
    sequences: np.ndarray,  # [R]: which context a row belongs to; the rows of one stand together
    vocabulary: int,
    drafts: Sequence[Sequence[int]] | None = None,
) -> Tensor | None:  # [R, ceil(V / 32)] int32
    """The tokens that each row's grammar allows next, a bit a token; None where no context has a grammar.

    The first row of a context is for its next token, each later one for the token after one draft more.
    Ids that the tokenizer has no token for (a padded vocabulary) are not allowed in rows with a grammar.
    Rows behind a draft that the grammar refuses, or behind one that ends the output, are never sampled
    from: they allow everything. So do rows whose grammar exceeds a limit: the matcher raises when it is given
    the token, which ends that request alone.
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
    fill_bitmasks([(one, row) for one, row in rows if isinstance(one, LLGuidanceMatcher)], bitmask)
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
    """The next tokens of a context as long as its grammar allows exactly one, at most ``limit``.

    A token that ends the output is never among them: whoever samples it ends the context as always.
    ``vocabulary`` is that of the logits. The matcher is left where it was.
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
    """The longest beginning of ``draft`` that the context's grammar accepts; all of it without a grammar.

    A draft may end with a token that ends the output; nothing follows one. The matcher is left where it was.
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
def going_ahead(context: TextContext) -> Iterator[Callable[[int], bool]]:
    """Lets a context's matcher go on with tokens that are taken back at the end.

    In between `grammar_bitmask` says what may follow them. What it gives takes the next token and says
    whether any may come after it: the grammar accepts it, and it does not end the output. Without a grammar
    that is always so.
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
    """Whether the next byte is certain: cheap, and it rules out nearly every position for a certain token."""
    try:
        return bool(matcher.find_jump_forward_string())
    except UnicodeDecodeError:  # certain bytes that are not a whole character
        return True


def _allowed_words(row: Tensor, vocabulary: int) -> np.ndarray:  # [ceil(V / 32)] uint32
    """A filled row as words, in which the bits behind the vocabulary are cleared: they may be set."""
    words: np.ndarray = row[0].numpy().view(np.uint32)
    if vocabulary % 32:
        words[-1] &= np.uint32((1 << vocabulary % 32) - 1)
    return words


class _Walk:
    """Steps ahead that are taken back at the end."""

    def __init__(self, matcher: GrammarMatcher) -> None:
        self._matcher = matcher
        self.length = 0

    def accept(self, token: int) -> bool:
        try:
            accepted = bool(self._matcher.accept_token(token))
        except InputError:  # raised again when the context takes its next token
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
