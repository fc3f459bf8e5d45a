"""Determines which tokens of a text precede the tokens that are passed to `TextTokenizer.decode`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.pipelines.core import TextContext, TextGenerationStatus
from penstock.text.detokenizer import TokenDecoder, delta_text

_MAX_PRECEDING_TOKENS = 64
"""Maximum number of preceding tokens in a delta.

The text of a token depends only on a few tokens before it, not counting the tokens that decoding skips.
"""
_STATE_ATTRIBUTE = "_decode_state"  # the attribute of a context that stores its `_DecodeState`


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Consecutive tokens of a text (a delta), with the tokens before them."""

    ids: list[int]
    preceding_ids: list[int]
    """The last tokens of the same text before ``ids``."""
    prompt_ids: list[int]
    """The last tokens of the prompt before the text; empty without a prompt."""
    is_last: bool
    """Whether the text ends with this delta; always False for a text that the context has not generated."""

    def text(self, tokenizer: TokenDecoder, skip_special_tokens: bool = True) -> str:
        """Return the text that these tokens add.

        An incomplete character at the end belongs to the next delta, unless this delta is the last delta.
        """
        return delta_text(
            tokenizer,
            self.prompt_ids,
            self.preceding_ids,
            self.ids,
            skip_special_tokens=skip_special_tokens,
            is_last=self.is_last,
        )


@dataclass(slots=True)
class _DecodeState:
    """The positions after the last call of `next_delta`: in the generated tokens and in the separate text.

    The separate text consists of tokens that the caller has passed, but that the context has not generated.
    """

    generated_position: int = 0
    """Number of generated tokens before the next call's tokens."""
    had_all_generated: bool = False
    """Whether the ``ids`` that were found last were all generated tokens, and at least two."""
    separate_ids: list[int] = field(default_factory=list)
    separate_position: int = 0
    """Number of ``separate_ids`` before the next call's tokens."""
    was_passed_at_once: bool = False
    """Whether one call passed all ``separate_ids``, and they are at least two."""


def next_delta(context: TextContext, ids: list[int], bos: int | None) -> TokenDelta:
    """Return ``ids`` with the tokens before them, and store the position on the context.

    Calls must follow the order of the tokens; threads can decode the deltas later. This function searches
    ``ids`` in the generated tokens of the context: after the tokens that it found there last, then at the
    end, then at the beginning. If the ``ids`` that it found last were all generated tokens, and at least two,
    it searches at the beginning before the end. If ``ids`` are not found, they belong to the separate text
    (see `_DecodeState`).

    If ``ids`` begin with ``bos``, the begin-of-sequence token, a new separate text begins. At the end of the
    separate text, ``ids`` start again at its first token in two cases: they repeat the whole text, or they
    repeat its beginning and one call has passed the whole text. A text of one token is never repeated.
    """
    state: _DecodeState = vars(context).setdefault(_STATE_ATTRIBUTE, _DecodeState())
    start = _position_in_generated(context, state, ids)
    if start is None:
        return _separate_text_delta(state, ids, bos)
    generated_tokens = context.generated_tokens
    end = state.generated_position = start + len(ids)
    state.had_all_generated = len(ids) == len(generated_tokens) > 1
    num_optional = context.status is TextGenerationStatus.END_OF_SEQUENCE  # callers may omit the last id
    return TokenDelta(
        ids,
        preceding_ids=generated_tokens[max(0, start - _MAX_PRECEDING_TOKENS) : start].tolist(),
        prompt_ids=context.prompt_tokens[-_MAX_PRECEDING_TOKENS:].tolist(),
        is_last=context.is_done and end >= len(generated_tokens) - num_optional,
    )


def _position_in_generated(context: TextContext, state: _DecodeState, ids: list[int]) -> int | None:
    generated_tokens = context.generated_tokens
    last_start = len(generated_tokens) - len(ids)
    fallbacks = [0, last_start] if state.had_all_generated else [last_start, 0]
    for start in [state.generated_position, *fallbacks]:
        if start >= 0 and ids and generated_tokens[start : start + len(ids)].tolist() == ids:
            return start
    return None


def _separate_text_delta(state: _DecodeState, ids: list[int], bos: int | None) -> TokenDelta:
    start, separate_ids = state.separate_position, state.separate_ids
    if ids and ids[0] == bos:
        start, separate_ids = 0, []
    elif separate_ids[start : start + len(ids)] != ids and _is_restart(state, ids):
        start = 0
    if separate_ids[start : start + len(ids)] != ids:
        separate_ids = [*separate_ids[:start], *ids]
    state.was_passed_at_once = (start == 0 and len(ids) == len(separate_ids) > 1) or (
        state.was_passed_at_once and separate_ids is state.separate_ids
    )
    state.separate_ids, state.separate_position = separate_ids, start + len(ids)
    return TokenDelta(
        ids,
        preceding_ids=separate_ids[max(0, start - _MAX_PRECEDING_TOKENS) : start],
        prompt_ids=[],
        is_last=False,
    )


def _is_restart(state: _DecodeState, ids: Sequence[int]) -> bool:
    """Return whether ``ids`` repeat the separate text from its beginning (see `next_delta`)."""
    is_whole = state.was_passed_at_once or len(ids) == len(state.separate_ids) > 1
    return (
        is_whole
        and state.separate_position == len(state.separate_ids)
        and state.separate_ids[: len(ids)] == ids
    )
