"""Token ids -> text, call by call: where the tokens of a call stand in the text of their context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.pipelines.core import TextContext, TextGenerationStatus
from penstock.text.detokenizer import TokenDecoder, text_of_piece

_KEPT = 64
"""Tokens before a piece that are kept; its text depends on the last few that are visible."""
_STATE = "_decoded"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens of a text, and what stands before them."""

    ids: list[int]
    before: list[int]
    """The last tokens before them, of the same text."""
    prompt: list[int]
    """The last tokens of the prompt that the text follows; empty where it follows none."""
    is_last: bool
    """Whether no token follows."""

    def text(self, tokenizer: TokenDecoder, skip_special_tokens: bool = True) -> str:
        """What these tokens add to the text before them.

        An unfinished character at the end is left to the next piece, unless this one is the last.
        """
        return text_of_piece(
            tokenizer,
            self.prompt,
            self.before,
            self.ids,
            skip_special_tokens=skip_special_tokens,
            is_last=self.is_last,
        )


@dataclass(slots=True)
class _Decoded:
    """How far the tokens of a context, and other tokens given with it, were decoded."""

    num_generated: int = 0
    gave_all_generated: bool = False
    """Whether the last call gave all that was generated."""
    others: list[int] = field(default_factory=list)
    num_others: int = 0
    came_whole: bool = False
    """Whether one call gave all of ``others``."""


def next_piece(context: TextContext, ids: list[int], bos: int | None) -> Piece:
    """The place of ``ids``, and the context remembers it. Call it in the order of the calls to decode.

    Tokens that the context has generated are found there: behind those of the last call, else at the end,
    else at the beginning. Other tokens are a text of their own, which each call continues. It begins again
    with ``bos`` (the token that begins every text, if there is one), or where a call gives all of it again.
    """
    state: _Decoded = vars(context).setdefault(_STATE, _Decoded())
    start = _place_in_generated(context, state, ids)
    if start is None:
        return _piece_of_others(state, ids, bos)
    generated = context.generated_tokens
    end = state.num_generated = start + len(ids)
    state.gave_all_generated = len(ids) == len(generated) > 1
    hidden = context.status is TextGenerationStatus.END_OF_SEQUENCE  # the token that ended the output
    return Piece(
        ids,
        before=generated[max(0, start - _KEPT) : start].tolist(),
        prompt=context.prompt_tokens[-_KEPT:].tolist(),
        is_last=context.is_done and end >= len(generated) - hidden,
    )


def _place_in_generated(context: TextContext, state: _Decoded, ids: list[int]) -> int | None:
    generated = context.generated_tokens
    at_end = len(generated) - len(ids)
    elsewhere = [0, at_end] if state.gave_all_generated else [at_end, 0]
    for start in [state.num_generated, *elsewhere]:
        if start >= 0 and ids and generated[start : start + len(ids)].tolist() == ids:
            return start
    return None


def _piece_of_others(state: _Decoded, ids: list[int], bos: int | None) -> Piece:
    start, others = state.num_others, state.others
    if ids and ids[0] == bos:
        start, others = 0, []
    elif others[start : start + len(ids)] != ids and _begins_again(state, ids):
        start = 0
    if others[start : start + len(ids)] != ids:
        others = [*others[:start], *ids]
    state.came_whole = (start == 0 and len(ids) == len(others) > 1) or (
        state.came_whole and others is state.others
    )
    state.others, state.num_others = others, start + len(ids)
    return Piece(ids, before=others[max(0, start - _KEPT) : start], prompt=[], is_last=False)


def _begins_again(state: _Decoded, ids: Sequence[int]) -> bool:
    is_whole = state.came_whole or len(ids) == len(state.others) > 1
    return is_whole and state.num_others == len(state.others) and state.others[: len(ids)] == ids
