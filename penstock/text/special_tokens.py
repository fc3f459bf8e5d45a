"""Finds special tokens in the content of user and tool messages, and encodes them as text.

A chat template copies message content into the prompt. In the prompt, ``<|im_end|>`` in a user's message is
equal to ``<|im_end|>`` in the template. To distinguish them, the messages are rendered a second time, with a
marker inside each special token of the messages, or around a special token of one character. A marker is text
that does not occur in the prompt. The positions of the markers in the second output show which special tokens
come from messages. Without the markers, the second output must equal the first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

from tokenizers import AddedToken, Tokenizer

from penstock.errors import InputError
from penstock.text.chat_template import Message

_TRUSTED_ROLES = ("system", "developer", "assistant")
_NON_CONTENT_KEYS = ("role", "type")  # templates compare these values, so they get no markers
_TEXTS_BEFORE = ("", "a", "\n", ".", "1", "é")  # adjacent text changes the tokens (see `_tokenizations`)
_SEPARATOR = "\0"


@dataclass(frozen=True)
class RenderedPrompt:
    """The text of a prompt and the positions of special tokens that come from message content."""

    text: str
    boundaries: Sequence[int] = ()
    """The positions of the markers in ``text``, ascending. Each is next to a character of message content.

    A special token comes from message content if one of these indices is inside it. A special token of one
    character comes from message content if both of its ends are in this list.
    """

    def is_from_message(self, start: int, end: int) -> bool:
        """Return whether the special token at ``text[start:end]`` comes from message content."""
        if end - start == 1:  # no index is inside a token of one character
            return self._is_boundary(start) and self._is_boundary(end)
        index = bisect_left(self.boundaries, start + 1)
        return index < len(self.boundaries) and self.boundaries[index] < end

    def _is_boundary(self, index: int) -> bool:
        position = bisect_left(self.boundaries, index)
        return position < len(self.boundaries) and self.boundaries[position] == index


class SpecialTokens:
    """The special tokens of a tokenizer. Finds special tokens in messages and encodes them as text.

    Args:
        tokens: the added tokens of the tokenizer. Tokens that are not special are ignored.
        normalize: the tokenizer's normalizer, if it has one.
    """

    def __init__(
        self, tokens: Mapping[int, AddedToken], normalize: Callable[[str], str] | None = None
    ) -> None:
        special_tokens = {
            token_id: token for token_id, token in tokens.items() if token.special and token.content
        }
        self.by_id = special_tokens  # token id -> special token
        self.texts = frozenset(token.content for token in special_tokens.values())
        self._max_text_length = max(map(len, self.texts), default=0)
        self._joined_texts = _SEPARATOR + _SEPARATOR.join(sorted(self.texts)) + _SEPARATOR
        # First two characters -> lengths of the special tokens that begin with them.
        self._lengths: dict[str, set[int]] = {}
        for text in self.texts:
            self._lengths.setdefault(text[:2], set()).add(len(text))
        has_normalized = any(token.normalized for token in special_tokens.values())
        self._normalize = normalize if has_normalized else None

    def render(
        self, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
    ) -> RenderedPrompt:
        """Render messages and find the special tokens that come from user and tool messages.

        Raises:
            InputError: the messages cannot be rendered, or they contain special tokens whose position in
                the output cannot be determined.
        """
        # Two attempts, because a template may print the time, which can change between two renderings.
        for _ in range(2):
            text = render(messages)
            for marks_partial_tokens in (True, False):
                if not self._with_markers(messages, "\0", marks_partial_tokens)[1]:
                    return RenderedPrompt(text)
                for marker in _markers(text):
                    marked_messages, _ = self._with_markers(messages, marker, marks_partial_tokens)
                    boundaries = _boundaries(text, marked_messages, render, marker)
                    if boundaries is not None:
                        return RenderedPrompt(text, boundaries)
        raise InputError(
            "a user or tool message contains a special token of the model, and the chat template changes the "
            "text around it, so the token cannot be distinguished from a token of the template: remove it "
            "from the message, or allow special tokens in messages with --special-tokens-in-content"
        )

    def encode(
        self, tokenizer: Tokenizer, prompt: RenderedPrompt, token_bytes: Callable[[int], bytes]
    ) -> list[int]:
        """Return the tokens of a rendered prompt. Special tokens from messages are encoded as text.

        ``token_bytes`` returns the bytes that a token adds in the middle of a text.

        Raises:
            InputError: the tokenizer cannot encode a special token as text.
        """
        [encoding] = tokenizer.encode_batch([prompt.text], add_special_tokens=False)
        ids: list[int] = []
        text_ids: dict[str, list[int]] = {}
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            text = prompt.text[start:end]
            if self._is_match(token_id, text) and prompt.is_from_message(start, end):
                if text not in text_ids:
                    text_ids[text] = self._encode_as_text(tokenizer, text, token_bytes)
                ids += text_ids[text]
            else:
                ids.append(token_id)
        return ids

    def _is_match(self, token_id: int, text: str) -> bool:
        """Return whether a token is special and ``text``, which it encodes, is the text of the token itself.

        The unknown token (``<unk>``) is special, but usually encodes another text.
        """
        token = self.by_id.get(token_id)
        if token is None:
            return False
        texts = [text] if self._normalize is None else [text, self._normalize(text)]
        return any(candidate.strip() == token.content.strip() for candidate in texts)

    def _encode_as_text(
        self, tokenizer: Tokenizer, text: str, token_bytes: Callable[[int], bytes]
    ) -> list[int]:
        """Return tokens, none of them special, that encode ``text`` in the middle of a longer text.

        Raises:
            InputError: the tokenizer cannot encode ``text`` without special tokens.
        """
        # With this option the library encodes special tokens as ordinary text. No other thread uses this copy
        # of the tokenizer.
        tokenizer.encode_special_tokens = True
        try:
            ids = next(_tokenizations(tokenizer, text, token_bytes, self.by_id), None)
            if ids is None and len(text) > 1:
                ids_by_character = [
                    next(_tokenizations(tokenizer, character, token_bytes, self.by_id), None)
                    for character in text
                ]
                ids = (
                    None
                    if None in ids_by_character
                    else [token_id for character_ids in ids_by_character for token_id in character_ids or ()]
                )
        finally:
            tokenizer.encode_special_tokens = False
        if ids is None:
            raise InputError(
                f"a user or tool message contains the special token {text!r}, which the tokenizer cannot "
                "encode as text: remove it, or allow special tokens in messages with "
                "--special-tokens-in-content"
            )
        return ids

    def _with_markers(
        self, messages: Sequence[Message], marker: str, marks_partial_tokens: bool
    ) -> tuple[list[Message], bool]:
        """Return the messages with markers, and whether a marker was inserted.

        Args:
            messages: the messages.
            marker: the text to insert inside special tokens.
            marks_partial_tokens: whether to insert markers also where content begins or ends with a part of a
                special token. The template or other content may add the other part of the token.
        """
        marked_messages = [
            message
            if message.get("role") in _TRUSTED_ROLES
            else cast("Message", self._mark_value(message, marker, marks_partial_tokens))
            for message in messages
        ]
        return marked_messages, any(
            marked_message != original_message
            for marked_message, original_message in zip(marked_messages, messages, strict=True)
        )

    def _mark_value(
        self, value: object, marker: str, marks_partial_tokens: bool, is_content: bool = False
    ) -> object:
        match value:
            case str():
                indices = self._indices_inside(value)
                if marks_partial_tokens and is_content:
                    indices |= self._indices_at_ends(value)
                return _with_insertions(value, marker, indices) if indices else value
            case Mapping():
                return {
                    key: item
                    if key in _NON_CONTENT_KEYS
                    else self._mark_value(item, marker, marks_partial_tokens, key in ("content", "text"))
                    for key, item in value.items()
                }
            case list():
                return [self._mark_value(item, marker, marks_partial_tokens, is_content) for item in value]
        return value

    def _indices_inside(self, text: str) -> set[int]:
        """Return one index inside each special token in the text, or both ends of a token of one character.

        If only the normalized text contains a special token, return all indices of the text.
        """
        indices: set[int] = set()
        for first_characters, lengths in self._lengths.items():
            start = text.find(first_characters)
            while start >= 0:
                if any(text[start : start + length] in self.texts for length in lengths):
                    indices |= {start, start + 1} if len(first_characters) == 1 else {start + 1}
                start = text.find(first_characters, start + 1)
        if not indices and self._normalize is not None:
            normalized_text = self._normalize(text)
            if any(token_text in normalized_text for token_text in self.texts):
                indices = set(range(len(text) + 1))
        return indices

    def _indices_at_ends(self, text: str) -> set[int]:
        """Return the indices of the start and the end of the text that may be inside a special token.

        The start can be inside a token if the text begins with a suffix of a special token, or is a part of a
        special token. The end can be inside a token if the text ends with a prefix of a special token.
        """
        stripped_text = text.strip()
        start = len(text) - len(text.lstrip())
        indices: set[int] = set()
        if (
            len(stripped_text) < self._max_text_length
            and stripped_text
            and stripped_text in self._joined_texts
        ):
            indices.add(start)
        for length in range(1, min(len(stripped_text), self._max_text_length - 1) + 1):
            if stripped_text[:length] not in self._joined_texts:
                break
            if stripped_text[:length] + _SEPARATOR in self._joined_texts:
                indices.add(start)
        for length in range(1, min(len(stripped_text), self._max_text_length - 1) + 1):
            if stripped_text[-length:] not in self._joined_texts:
                break
            if _SEPARATOR + stripped_text[-length:] in self._joined_texts:
                indices.add(start + len(stripped_text))
        return indices


def _markers(text: str) -> Iterator[str]:
    """Yield two markers that the text does not contain: a private-use character and a string like "q0z"."""
    yield next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in text)
    yield next(f"q{number}z" for number in range(10**6) if f"q{number}z" not in text)


def _boundaries(
    text: str, marked_messages: Sequence[Message], render: Callable[[Sequence[Message]], str], marker: str
) -> list[int] | None:
    """Return the positions of the markers in ``text``; None if the template fails or changes the text."""
    try:
        parts = render(marked_messages).split(marker)
    except InputError:
        return None
    if "".join(parts) != text:
        return None
    boundaries, index = [], 0
    for part in parts[:-1]:
        index += len(part)
        boundaries.append(index)
    return boundaries


def _with_insertions(text: str, marker: str, indices: Iterable[int]) -> str:
    boundaries = [0, *sorted(indices), len(text)]
    return marker.join(text[start:end] for start, end in pairwise(boundaries))


def _tokenizations(
    tokenizer: Tokenizer,
    text: str,
    token_bytes: Callable[[int], bytes],
    special_tokens: Mapping[int, AddedToken],
) -> Iterator[list[int]]:
    """Yield tokenizations of ``text`` without special tokens, as encoded after each of `_TEXTS_BEFORE`.

    Tokenizations whose bytes equal the text come first. The last result is the first tokenization of all,
    whose bytes may differ from the text, for example because of a normalizer.
    """
    fallback_ids: list[int] = []
    for text_before in _TEXTS_BEFORE:
        ids_before = tokenizer.encode(text_before, add_special_tokens=False).ids if text_before else []
        ids = tokenizer.encode(text_before + text, add_special_tokens=False).ids
        if ids[: len(ids_before)] != ids_before or not special_tokens.keys().isdisjoint(ids):
            continue
        fallback_ids = fallback_ids or ids[len(ids_before) :]
        if b"".join(map(token_bytes, ids[len(ids_before) :])) == text.encode():
            yield ids[len(ids_before) :]
    if fallback_ids:
        yield fallback_ids
