"""Converts tokens to text incrementally, in whole characters, and matches stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

# An incomplete UTF-8 character has at most three bytes, and therefore at most three tokens. The window
# contains one more token as context.
_OPEN_CHARACTER_WINDOW = 4
_PROMPT_WINDOW = 2 * _OPEN_CHARACTER_WINDOW  # the first tokens of this window may be an incomplete character
_UTF8 = codecs.getincrementaldecoder("utf-8")
AnyTokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer]


class TokenDecoder(Protocol):
    """The part of a tokenizer that a detokenizer uses.

    `TextTokenizer` and `penstock.testing.FakeTokenizer` implement it.
    """

    @property
    def byte_tokens(self) -> Mapping[int, int]:
        """Token id -> byte, if the decoder decodes consecutive byte tokens together; otherwise empty."""
        ...

    def is_visible(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Return whether decoding includes this token."""
        ...

    def decode_ids(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        ...


class Detokenizer:
    """Converts the tokens of one request to text and matches stop strings.

    The concatenated results of `append` and `finish` equal `text_after_prompt` of the prompt and all ids, up
    to the first stop string. The first stop string is the stop string that ends first. If several stop
    strings end at the same position, it is the longest of them. Text is held back while later tokens can
    change it, and while it can be the beginning of a stop string. With ``keeps_stop`` the text includes the
    stop string.

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
        prompt: AnyTokenIds = (),
        skip_special_tokens: bool = True,
        keeps_stop: bool = False,
    ) -> None:
        self._keeps_stop = keeps_stop
        self.stop_match: str | None = None  # the stop string that ended the text
        self.num_tokens = 0  # appended tokens, up to and including the token that completed a stop string
        self._decoder = _IncrementalDecoder(tokenizer, prompt, skip_special_tokens)
        self._stops = (stop,) if isinstance(stop, str) else tuple(stop)
        self._stops = tuple(filter(None, self._stops))  # an empty stop string would match immediately
        self._stop_bytes = tuple(stop.encode(errors="replace") for stop in self._stops)
        self._held_text = ""  # text held back: the longest suffix that is a prefix of a stop string
        self._returned_parts: list[str] = []
        self._is_finished = False

    @property
    def text(self) -> str:
        """The concatenated results of `append` and `finish` so far."""
        return "".join(self._returned_parts)

    def append(self, token_ids: Sequence[int] | int) -> str:
        """Add tokens and return the text that has become final. Tokens after a stop string are dropped."""
        assert not self._is_finished, "append after finish"
        ids = token_ids if isinstance(token_ids, Iterable) else (token_ids,)
        return self._record("".join([self._append_token(int(token_id)) for token_id in ids]))

    def finish(self) -> str:
        """End the output, and return the text that was held back; "" after a stop string.

        An incomplete character becomes U+FFFD, as in a full decode.
        """
        self._is_finished = True
        if self.stop_match is not None:
            return ""
        text = self._release(self._decoder.finish())
        held_text, self._held_text = self._held_text, ""
        return self._record(text + held_text)

    def _append_token(self, token_id: int) -> str:
        if self.stop_match is not None:
            return ""
        self.num_tokens += 1
        text = self._release(self._decoder.push(token_id))
        return text if self.stop_match is not None else text + self._stop_in_byte_run()

    def _release(self, text: str) -> str:
        """Append ``text`` to the held text and return the part that cannot be part of a later stop string.

        If a stop string matches, set `stop_match` and return the text before the match, with ``keeps_stop``
        including the match.
        """
        if not self._stops:
            return text
        text = self._held_text + text
        match = _first_stop(text, self._stops)
        if match is not None:
            start, self.stop_match = match
            self._held_text = ""
            return text[: start + len(self.stop_match) * self._keeps_stop]
        release_length = len(text) - _open_suffix_length(text, self._stops)
        self._held_text = text[release_length:]
        return text[:release_length]

    def _stop_in_byte_run(self) -> str:
        """Return the text up to a stop string that the byte tokens at the end complete, else "".

        The text of consecutive byte tokens is not final, but a stop string in it must match immediately.
        """
        run = self._decoder.byte_run
        if not run or not self._stops:
            return ""
        tail = self._held_text.encode() + run[-max(map(len, self._stop_bytes)) :]
        if not tail.endswith(self._stop_bytes):
            return ""
        # `tail` cannot be used, because decoders may strip its leading space
        text = self._held_text + self._decoder.peek()
        return "" if _first_stop(text, self._stops) is None else self._release(self._decoder.finish())

    def _record(self, text: str) -> str:
        if text:
            self._returned_parts.append(text)
        return text


class _IncrementalDecoder:
    """Converts tokens to final text. The time per token does not depend on the length of the text.

    The text of a token depends on adjacent tokens: decoders strip the leading space of the first token, and
    several byte tokens can be one character. Therefore a window of tokens is decoded. It contains the tokens
    whose text is not final, and tokens before them as context.
    """

    def __init__(self, tokenizer: TokenDecoder, prompt: AnyTokenIds, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._byte_tokens = tokenizer.byte_tokens
        self._window = _decoding_context(tokenizer, prompt)
        # Bytes of the byte tokens at the end of the window, without complete characters of the prompt; empty
        # if they are not UTF-8.
        self.byte_run = bytearray()
        # None if the byte tokens at the end are not UTF-8.
        self._utf8: codecs.IncrementalDecoder | None = _UTF8()
        # Number of characters of the window's text that were returned or belong to the prompt.
        self._num_returned = 0
        if self._window:
            self._num_returned = len(prompt_text(tokenizer, self._window))
            for token_id in self._window[
                len(self._window) - _num_byte_tokens_at_end(tokenizer, self._window) :
            ]:
                self._extend_run(self._byte_tokens[token_id])
            if self._utf8 is not None:
                # Complete characters belong to the prompt, in which stop strings do not match.
                del self.byte_run[: len(self.byte_run) - len(self._utf8.getstate()[0])]

    def push(self, token_id: int) -> str:
        """Add a token and return the text that has become final."""
        # A skipped token must not be the context. Otherwise the next token would be decoded as the first
        # token of a text.
        if not self._tokenizer.is_visible(token_id, self._skip_special_tokens):
            return ""
        self._window.append(token_id)
        if token_id in self._byte_tokens:
            self._extend_run(self._byte_tokens[token_id])
            return ""
        if self._utf8 is None or self.byte_run:
            self._utf8 = _UTF8()
            self.byte_run.clear()
        return self._commit_text()

    def finish(self) -> str:
        """Return the text of the window that has not been returned, including an incomplete character."""
        text = self._decode()
        new_text, self._num_returned = text[self._num_returned :], len(text)
        return new_text

    def peek(self) -> str:
        """Return the result of `finish` without a change of state."""
        return self._decode()[self._num_returned :]

    def _extend_run(self, byte: int) -> None:
        # One invalid byte makes all consecutive byte tokens invalid. Their text is final when a token of
        # another kind follows.
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
        # In byte-level vocabularies, the last U+FFFD can be a character that later tokens complete.
        is_open = text.endswith("\N{REPLACEMENT CHARACTER}") and not self._byte_tokens
        num_final = len(text) - is_open
        new_text = text[self._num_returned : num_final]
        self._num_returned = num_final
        if not is_open:
            self._shrink(1)
        elif len(self._window) > 4 * _OPEN_CHARACTER_WINDOW:
            self._shrink(_OPEN_CHARACTER_WINDOW, num_open_characters=1)
        return new_text

    def _shrink(self, num_tokens: int, num_open_characters: int = 0) -> None:
        """Keep the last ``num_tokens``, whose last ``num_open_characters`` have not been returned yet."""
        del self._window[:-num_tokens]
        self._num_returned = len(self._decode()) - num_open_characters

    def _decode(self) -> str:
        return self._tokenizer.decode_ids(self._window, self._skip_special_tokens)


def text_after_prompt(
    tokenizer: TokenDecoder, prompt: AnyTokenIds, ids: Sequence[int], skip_special_tokens: bool = True
) -> str:
    """Return the text that ``ids`` add after a prompt: the text of prompt and ids without `prompt_text`.

    Decoding ``ids`` alone would drop the leading space of the output's first word. If the prompt ends with
    a special token, ``ids`` are nevertheless decoded as the beginning of a text.
    """
    context = _decoding_context(tokenizer, prompt)
    start = len(prompt_text(tokenizer, context)) if context else 0
    return tokenizer.decode_ids([*context, *ids], skip_special_tokens)[start:]


def delta_text(
    tokenizer: TokenDecoder,
    prompt: AnyTokenIds,
    preceding_ids: Sequence[int],
    ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
    is_last: bool = False,
) -> str:
    """Return the text that ``ids`` add after ``prompt`` and ``preceding_ids``.

    For every division of a text into deltas, the concatenated results equal `text_after_prompt` of the whole
    text if the last call has ``is_last``. Without ``is_last``, an incomplete character at the end belongs to
    the next delta.

    The results differ from `text_after_prompt` in one case: a character of consecutive byte tokens is
    returned before a later byte makes these tokens invalid UTF-8. Later deltas then have fewer U+FFFD.
    """
    visible_ids = [
        token_id for token_id in preceding_ids if tokenizer.is_visible(token_id, skip_special_tokens)
    ][-_PROMPT_WINDOW:]
    if len(visible_ids) < _PROMPT_WINDOW:
        visible_ids = [*_decoding_context(tokenizer, prompt), *visible_ids]
    context = _skip_partial_character(tokenizer, visible_ids)
    start = len(prompt_text(tokenizer, context, skip_special_tokens)) if context else 0
    all_ids = [*context, *(token for token in ids if tokenizer.is_visible(token, skip_special_tokens))]
    if is_last:
        return tokenizer.decode_ids(all_ids, skip_special_tokens)[start:]
    return prompt_text(tokenizer, all_ids, skip_special_tokens)[start:]


def prompt_text(tokenizer: TokenDecoder, prompt: AnyTokenIds, skip_special_tokens: bool = True) -> str:
    """Return the text of a prompt without an incomplete character at its end, which belongs to the output."""
    ids = [int(token_id) for token_id in prompt]
    if not tokenizer.byte_tokens:
        text = tokenizer.decode_ids(ids, skip_special_tokens)
        return text.removesuffix("\N{REPLACEMENT CHARACTER}")
    utf8 = _UTF8()
    try:
        for token_id in ids[len(ids) - _num_byte_tokens_at_end(tokenizer, ids) :]:
            utf8.decode(bytes([tokenizer.byte_tokens[token_id]]))
    except UnicodeDecodeError:
        return tokenizer.decode_ids(ids, skip_special_tokens)
    return tokenizer.decode_ids(ids[: len(ids) - len(utf8.getstate()[0])], skip_special_tokens)


def _decoding_context(tokenizer: TokenDecoder, prompt: AnyTokenIds) -> list[int]:
    """Return the last tokens of a prompt, at most `_PROMPT_WINDOW`, on which the following text depends.

    Tokens up to the last special token are not included.
    """
    ids: list[int] = []
    for token_id in prompt[: -_PROMPT_WINDOW - 1 : -1]:
        if not tokenizer.is_visible(int(token_id)):
            break
        ids.insert(0, int(token_id))
    return _skip_partial_character(tokenizer, ids)


def _skip_partial_character(tokenizer: TokenDecoder, ids: list[int]) -> list[int]:
    start = 0
    while start < len(ids) and tokenizer.byte_tokens.get(ids[start], 0) & 0xC0 == 0x80:
        start += 1  # skip continuation bytes of a character whose first byte is outside the window
    return ids[start:]


def _num_byte_tokens_at_end(tokenizer: TokenDecoder, ids: Sequence[int]) -> int:
    count = 0
    while count < len(ids) and ids[-1 - count] in tokenizer.byte_tokens:
        count += 1
    return count


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return (start, stop string) of the match that ends first; None if no stop string matches.

    If several matches end at the same position, the longest is returned.
    """
    matches = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    return min(matches)[1:] if matches else None


def _open_suffix_length(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of a stop string."""
    max_length = min(len(text), max(map(len, stops)) - 1)
    for length in range(max_length, 0, -1):
        suffix = text[-length:]
        if any(stop.startswith(suffix) for stop in stops):
            return length
    return 0
