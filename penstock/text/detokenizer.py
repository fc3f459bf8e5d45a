"""Token ids -> text, as they come: whole characters only. The one place where stop strings are matched."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

# An unfinished UTF-8 character has at most three bytes, so three tokens; one more before them as context.
_OPEN_CHARACTER_WINDOW = 4
_PROMPT_WINDOW = 2 * _OPEN_CHARACTER_WINDOW  # the cut may go through a character in byte tokens
_UTF8 = codecs.getincrementaldecoder("utf-8")
TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]


class TokenDecoder(Protocol):
    """What a detokenizer asks of a tokenizer: `TextTokenizer`, `penstock.testing.FakeTokenizer`."""

    @property
    def byte_tokens(self) -> Mapping[int, int]:
        """Token id to byte, where the decoder judges a run of such tokens as a whole; else empty."""
        ...

    def is_visible(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether decoding looks at this token at all."""
        ...

    def decode_ids(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """The text of one request.

    All pieces that `append` and `finish` return, joined, are `text_behind` of the prompt and all ids, up to
    the first stop string: the one that is complete first, of several that end at the same character the
    longest. A piece is held back only while later tokens may still change it or while it may be the beginning
    of a stop string. With ``keeps_stop`` the text ends behind the stop string.

    >>> from penstock.testing import FakeTokenizer
    >>> detokenizer = Detokenizer(FakeTokenizer(), stop=["END"])
    >>> [detokenizer.append(ord(letter)) for letter in "go ENTENDRE"]
    ['g', 'o', ' ', '', '', 'ENT', '', '', '', '', '']
    >>> detokenizer.stop_match, detokenizer.num_tokens, detokenizer.text
    ('END', 9, 'go ENT')
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        stop: str | Sequence[str] = (),
        *,
        prompt: TokenIds = (),
        skip_special_tokens: bool = True,
        keeps_stop: bool = False,
    ) -> None:
        self._keeps_stop = keeps_stop
        self.stop_match: str | None = None
        self.num_tokens = 0  # tokens up to and including the one that completed the stop string
        self._stream = _IncrementalDecoder(tokenizer, prompt, skip_special_tokens)
        self._stops = (stop,) if isinstance(stop, str) else tuple(stop)
        self._stops = tuple(filter(None, self._stops))  # an empty one would end every text at once
        self._stop_bytes = tuple(stop.encode(errors="replace") for stop in self._stops)
        self._held = ""  # the longest end of the text that a stop string may begin with
        self._pieces: list[str] = []
        self._finished = False

    @property
    def text(self) -> str:
        """What `append` and `finish` have returned so far."""
        return "".join(self._pieces)

    def append(self, token_ids: Sequence[int] | int) -> str:
        """The text that these tokens settle. Tokens after a stop string are dropped and not counted."""
        assert not self._finished, "append after finish"
        ids = token_ids if isinstance(token_ids, Iterable) else (token_ids,)
        return self._record("".join([self._append_one(int(token_id)) for token_id in ids]))

    def finish(self) -> str:
        """What was held back, an unfinished character as decoding all ids would show it."""
        self._finished = True
        if self.stop_match is not None:
            return ""
        text = self._release(self._stream.finish())
        held, self._held = self._held, ""
        return self._record(text + held)

    def _append_one(self, token_id: int) -> str:
        if self.stop_match is not None:
            return ""
        self.num_tokens += 1
        text = self._release(self._stream.push(token_id))
        return text if self.stop_match is not None else text + self._stop_in_byte_run()

    def _release(self, text: str) -> str:
        """The part of held and new text that no stop string can touch any more."""
        if not self._stops:
            return text
        text = self._held + text
        match = _first_stop(text, self._stops)
        if match is not None:
            start, self.stop_match = match
            self._held = ""
            return text[: start + len(self.stop_match) * self._keeps_stop]
        split = len(text) - _open_suffix(text, self._stops)
        self._held = text[split:]
        return text[:split]

    def _stop_in_byte_run(self) -> str:
        """A run of byte tokens is no settled text yet, but a stop string that it completes ends it now."""
        run = self._stream.byte_run
        if not run or not self._stops:
            return ""
        tail = self._held.encode() + run[-max(map(len, self._stop_bytes)) :]
        if not tail.endswith(self._stop_bytes):
            return ""
        text = self._held + self._stream.peek()  # decoders may strip a space at the beginning
        return "" if _first_stop(text, self._stops) is None else self._release(self._stream.finish())

    def _record(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text


class _IncrementalDecoder:
    """Tokens -> settled text, at a cost a token that does not grow with the text.

    Decoders look at a token's neighbours: the first token loses its space, bytes join to characters. So a
    window of tokens is decoded: one whose text is settled, as context, and those whose text is not.
    """

    def __init__(self, tokenizer: TokenDecoder, prompt: TokenIds, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._bytes = tokenizer.byte_tokens
        self._window = _context(tokenizer, prompt)
        self.byte_run = bytearray()  # of the byte tokens at the window's end; empty if they are no UTF-8
        self._utf8: codecs.IncrementalDecoder | None = _UTF8()  # None in a run that is no UTF-8
        self._settled = 0  # characters of the window's text that have been returned, or are the prompt's
        if self._window:
            self._settled = len(prompt_text(tokenizer, self._window))
            for token_id in self._window[len(self._window) - _num_bytes_at_end(tokenizer, self._window) :]:
                self._extend_run(self._bytes[token_id])
            if (
                self._utf8 is not None
            ):  # whole characters are the prompt's: no stop string is looked for there
                del self.byte_run[: len(self.byte_run) - len(self._utf8.getstate()[0])]

    def push(self, token_id: int) -> str:
        # Invisible tokens must not be the context: the next token would be decoded as the first of a text.
        if not self._tokenizer.is_visible(token_id, self._skip_special_tokens):
            return ""
        self._window.append(token_id)
        if token_id in self._bytes:
            self._extend_run(self._bytes[token_id])
            return ""
        if self._utf8 is None or self.byte_run:
            self._utf8 = _UTF8()
            self.byte_run.clear()
        return self._commit_text()

    def finish(self) -> str:
        text = self._decode()
        new, self._settled = text[self._settled :], len(text)
        return new

    def peek(self) -> str:
        """What `finish` would return, changing nothing."""
        return self._decode()[self._settled :]

    def _extend_run(self, byte: int) -> None:
        # One bad byte spoils its whole run, whose text is settled only by the next other token.
        if self._utf8 is None:
            return
        self.byte_run.append(byte)
        try:
            self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._utf8 = None
            self.byte_run.clear()

    def _commit_text(self) -> str:
        text = self._decode()
        # Where bytes join across tokens, the last U+FFFD may be a character that is not complete yet.
        is_open = text.endswith("\N{REPLACEMENT CHARACTER}") and not self._bytes
        settled = len(text) - is_open
        new = text[self._settled : settled]
        self._settled = settled
        if not is_open:
            self._shrink(1)
        elif len(self._window) > 4 * _OPEN_CHARACTER_WINDOW:
            self._shrink(_OPEN_CHARACTER_WINDOW, open_characters=1)
        return new

    def _shrink(self, size: int, open_characters: int = 0) -> None:
        del self._window[:-size]
        self._settled = len(self._decode()) - open_characters

    def _decode(self) -> str:
        return self._tokenizer.decode_ids(self._window, self._skip_special_tokens)


def text_behind(
    tokenizer: TokenDecoder, prompt: TokenIds, ids: Sequence[int], skip_special_tokens: bool = True
) -> str:
    """What ``ids`` write behind a prompt: the text of both together without `prompt_text`.

    A decoder drops the space that begins a text, which is none of the first word of an answer. Behind a
    special token a new text begins.
    """
    context = _context(tokenizer, prompt)
    start = len(prompt_text(tokenizer, context)) if context else 0
    return tokenizer.decode_ids([*context, *ids], skip_special_tokens)[start:]


def text_of_piece(
    tokenizer: TokenDecoder,
    prompt: TokenIds,
    before: Sequence[int],
    ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
    is_last: bool = False,
) -> str:
    """What ``ids`` add to the text of ``before``, which follows a prompt.

    The pieces of a text, joined, are its `text_behind` the prompt, however it is cut. An unfinished character
    at the end is left out unless ``is_last``; the next piece begins with it. Only where bytes turn out to be
    no UTF-8 after a whole character of their run was returned, later pieces have fewer U+FFFD.
    """
    visible = [one for one in before if tokenizer.is_visible(one, skip_special_tokens)][-_PROMPT_WINDOW:]
    if len(visible) < _PROMPT_WINDOW:
        visible = [*_context(tokenizer, prompt), *visible]
    context = _from_whole_character(tokenizer, visible)
    start = len(prompt_text(tokenizer, context, skip_special_tokens)) if context else 0
    together = [*context, *(one for one in ids if tokenizer.is_visible(one, skip_special_tokens))]
    if is_last:
        return tokenizer.decode_ids(together, skip_special_tokens)[start:]
    return prompt_text(tokenizer, together, skip_special_tokens)[start:]


def prompt_text(tokenizer: TokenDecoder, prompt: TokenIds, skip_special_tokens: bool = True) -> str:
    """The text of a prompt's tokens, but for an unfinished character at the end: that is the answer's."""
    ids = [int(token_id) for token_id in prompt]
    if not tokenizer.byte_tokens:
        text = tokenizer.decode_ids(ids, skip_special_tokens)
        return text.removesuffix("\N{REPLACEMENT CHARACTER}")
    utf8 = _UTF8()
    try:
        for token_id in ids[len(ids) - _num_bytes_at_end(tokenizer, ids) :]:
            utf8.decode(bytes([tokenizer.byte_tokens[token_id]]))
    except UnicodeDecodeError:
        return tokenizer.decode_ids(ids, skip_special_tokens)
    return tokenizer.decode_ids(ids[: len(ids) - len(utf8.getstate()[0])], skip_special_tokens)


def _context(tokenizer: TokenDecoder, prompt: TokenIds) -> list[int]:
    """The last tokens of a prompt, as many as the text behind them depends on; none behind a special one."""
    ids: list[int] = []
    for token_id in prompt[: -_PROMPT_WINDOW - 1 : -1]:
        if not tokenizer.is_visible(int(token_id)):
            break
        ids.insert(0, int(token_id))
    return _from_whole_character(tokenizer, ids)


def _from_whole_character(tokenizer: TokenDecoder, ids: list[int]) -> list[int]:
    start = 0
    while start < len(ids) and tokenizer.byte_tokens.get(ids[start], 0) & 0xC0 == 0x80:
        start += 1  # the end of a character whose beginning is cut off
    return ids[start:]


def _num_bytes_at_end(tokenizer: TokenDecoder, ids: Sequence[int]) -> int:
    count = 0
    while count < len(ids) and ids[-1 - count] in tokenizer.byte_tokens:
        count += 1
    return count


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """(start, stop string) of the match that ends first; of several with the same end, the longest."""
    found = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    return min(found)[1:] if found else None


def _open_suffix(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is a beginning of a stop string."""
    longest = min(len(text), max(map(len, stops)) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0
