"""Finds special tokens in the content of user and tool messages, and encodes them as text.

A chat template copies message content into the prompt. There, ``<|im_end|>`` in a user's message looks like
the same token written by the template. Therefore the messages are rendered twice: the second time with a
marker (text that occurs nowhere in the prompt) inside each special token in their content. The positions of
the markers in the output show which special tokens come from messages. The second output without the markers
must equal the first output.
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
_NOT_CONTENT = ("role", "type")
_ANCHORS = ("", "a", "\n", ".", "1", "é")
_SEPARATOR = "\0"


@dataclass(frozen=True)
class RenderedPrompt:
    """The text of a prompt and the positions of special tokens that come from message content."""

    text: str
    boundaries: Sequence[int] = ()
    """Ascending indices next to a character of message content. A special token that spans one of them does
    not come from the template."""

    def is_from_message(self, start: int, end: int) -> bool:
        """Return whether the special token at ``text[start:end]`` comes from message content."""
        if end - start == 1:  # a single character has no index inside it: markers enclose it
            return self._has(start) and self._has(end)
        index = bisect_left(self.boundaries, start + 1)
        return index < len(self.boundaries) and self.boundaries[index] < end

    def _has(self, index: int) -> bool:
        found = bisect_left(self.boundaries, index)
        return found < len(self.boundaries) and self.boundaries[found] == index


class SpecialTokens:
    """The special tokens of a tokenizer. Finds them in messages.

    Args:
        tokens: the added tokens of the tokenizer. Tokens that are not special are ignored.
        normalize: the tokenizer's normaliser, if it has one.
    """

    def __init__(
        self, tokens: Mapping[int, AddedToken], normalize: Callable[[str], str] | None = None
    ) -> None:
        special = {token_id: token for token_id, token in tokens.items() if token.special and token.content}
        self.by_id = special
        self.texts = frozenset(token.content for token in special.values())
        self._longest = max(map(len, self.texts), default=0)
        self._joined = _SEPARATOR + _SEPARATOR.join(sorted(self.texts)) + _SEPARATOR
        self._lengths: dict[str, set[int]] = {}  # first two characters -> lengths of the tokens
        for text in self.texts:
            self._lengths.setdefault(text[:2], set()).add(len(text))
        has_normalized = any(token.normalized for token in special.values())
        self._normalize = normalize if has_normalized else None

    def render(
        self, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
    ) -> RenderedPrompt:
        """Render messages and find the special tokens that come from user and tool messages.

        Raises:
            InputError: the messages cannot be rendered, or they contain special tokens whose position in
                the output cannot be determined.
        """
        for _ in range(2):  # a template may print the time, which may change between two renderings
            text = render(messages)
            for in_part in (True, False):
                if not self._with_markers(messages, "\0", in_part)[1]:
                    return RenderedPrompt(text)
                for marker in _markers(text):
                    marked, _ = self._with_markers(messages, marker, in_part)
                    boundaries = _boundaries(text, marked, render, marker)
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
        """Return the tokens of a rendered prompt. Special tokens from messages are encoded as text."""
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
        """Return whether ``text`` is the text of the special token. An unknown token can have any text."""
        token = self.by_id.get(token_id)
        if token is None:
            return False
        texts = [text] if self._normalize is None else [text, self._normalize(text)]
        return any(one.strip() == token.content.strip() for one in texts)

    def _encode_as_text(
        self, tokenizer: Tokenizer, text: str, token_bytes: Callable[[int], bytes]
    ) -> list[int]:
        """Return tokens of ``text`` inside another text, without special tokens."""
        # With this flag the library encodes special tokens as ordinary text. The copy belongs to this thread.
        tokenizer.encode_special_tokens = True
        try:
            ids = next(_tokenisations(tokenizer, text, token_bytes, self.by_id), None)
            if ids is None and len(text) > 1:
                parts = [
                    next(_tokenisations(tokenizer, character, token_bytes, self.by_id), None)
                    for character in text
                ]
                ids = None if None in parts else [one for part in parts for one in part or ()]
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
        self, messages: Sequence[Message], marker: str, in_part: bool
    ) -> tuple[list[Message], bool]:
        """Return the messages with markers, and whether a marker was inserted.

        Args:
            messages: the messages.
            marker: the text to insert inside special tokens.
            in_part: also insert it where content begins or ends with a part of a special token. The template
                or another piece of content may contain the rest.
        """
        marked = [
            message
            if message.get("role") in _TRUSTED_ROLES
            else cast("Message", self._marked(message, marker, in_part))
            for message in messages
        ]
        return marked, any(new != old for new, old in zip(marked, messages, strict=True))

    def _marked(self, value: object, marker: str, in_part: bool, is_content: bool = False) -> object:
        match value:
            case str():
                indices = self._indices_inside(value)
                if in_part and is_content:
                    indices |= self._indices_at_ends(value)
                return _inserted(value, marker, indices) if indices else value
            case Mapping():
                return {
                    key: item
                    if key in _NOT_CONTENT
                    else self._marked(item, marker, in_part, key in ("content", "text"))
                    for key, item in value.items()
                }
            case list():
                return [self._marked(item, marker, in_part, is_content) for item in value]
        return value

    def _indices_inside(self, text: str) -> set[int]:
        """Return an index inside each special token in the text."""
        indices: set[int] = set()
        for beginning, lengths in self._lengths.items():
            start = text.find(beginning)
            while start >= 0:
                if any(text[start : start + length] in self.texts for length in lengths):
                    indices |= {start, start + 1} if len(beginning) == 1 else {start + 1}
                start = text.find(beginning, start + 1)
        if not indices and self._normalize is not None:
            normalized = self._normalize(text)
            if any(token_text in normalized for token_text in self.texts):
                indices = set(range(len(text) + 1))
        return indices

    def _indices_at_ends(self, text: str) -> set[int]:
        """Return the start of the text if a suffix of a special token is there, and its end for a prefix."""
        core = text.strip()
        start = len(text) - len(text.lstrip())
        indices: set[int] = set()
        if len(core) < self._longest and core and core in self._joined:
            indices.add(start)
        for length in range(1, min(len(core), self._longest - 1) + 1):
            if core[:length] not in self._joined:
                break
            if core[:length] + _SEPARATOR in self._joined:
                indices.add(start)
        for length in range(1, min(len(core), self._longest - 1) + 1):
            if core[-length:] not in self._joined:
                break
            if _SEPARATOR + core[-length:] in self._joined:
                indices.add(start + len(core))
        return indices


def _markers(text: str) -> Iterator[str]:
    """Yield markers that the text does not contain: a private-use character, then one of ASCII letters."""
    yield next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in text)
    yield next(f"q{number}z" for number in range(10**6) if f"q{number}z" not in text)


def _boundaries(
    text: str, marked: Sequence[Message], render: Callable[[Sequence[Message]], str], marker: str
) -> list[int] | None:
    """Return the positions of the markers in ``text``; None if the template renders a different text."""
    try:
        pieces = render(marked).split(marker)
    except InputError:
        return None
    if "".join(pieces) != text:
        return None
    boundaries, index = [], 0
    for piece in pieces[:-1]:
        index += len(piece)
        boundaries.append(index)
    return boundaries


def _inserted(text: str, marker: str, indices: Iterable[int]) -> str:
    cuts = [0, *sorted(indices), len(text)]
    return marker.join(text[start:end] for start, end in pairwise(cuts))


def _tokenisations(
    tokenizer: Tokenizer, text: str, token_bytes: Callable[[int], bytes], special: Mapping[int, AddedToken]
) -> Iterator[list[int]]:
    """Yield tokens of the text without special tokens.

    Tokenisations with exactly the bytes of the text come first. The last one may have the bytes of the
    normalised text.
    """
    normalized_ids: list[int] = []
    for before in _ANCHORS:
        head = tokenizer.encode(before, add_special_tokens=False).ids if before else []
        ids = tokenizer.encode(before + text, add_special_tokens=False).ids
        if ids[: len(head)] != head or not special.keys().isdisjoint(ids):
            continue
        normalized_ids = normalized_ids or ids[len(head) :]
        if b"".join(map(token_bytes, ids[len(head) :])) == text.encode():
            yield ids[len(head) :]
    if normalized_ids:
        yield normalized_ids
