"""Special tokens that users and tools spell in messages: found in the rendered prompt, encoded as text.

A chat template copies the content of messages into the prompt, where ``<|im_end|>`` of a user looks like the
template's own. So the messages are rendered a second time, with a mark (a character that occurs nowhere)
inside each spelling. Where a mark comes out, the text is the user's; without the marks the text must be that
of the first time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenizers import AddedToken, Tokenizer

from penstock.errors import InputError
from penstock.text.chat_template import Message

_TRUSTED_ROLES = ("system", "developer", "assistant")
_NOT_CONTENT = ("role", "type")
_ANCHORS = ("", "a", "\n", ".", "1", "é")
_SEPARATOR = "\0"


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt's text, and where in it users and tools spell special tokens."""

    text: str
    boundaries: Sequence[int] = ()
    """Indices, ascending: the character before or the one behind is the user's, and a special token that
    spans the index is not the template's own."""

    def spans(self, start: int, end: int) -> bool:
        """Whether a special token from ``start`` to ``end`` is not the template's own."""
        if end - start == 1:  # nothing is inside a single character
            return self._has(start) and self._has(end)
        index = bisect_left(self.boundaries, start + 1)
        return index < len(self.boundaries) and self.boundaries[index] < end

    def _has(self, index: int) -> bool:
        found = bisect_left(self.boundaries, index)
        return found < len(self.boundaries) and self.boundaries[found] == index


class SpecialTokens:
    """The special tokens of a tokenizer, and where texts spell them.

    Args:
        tokens: the tokens of the tokenizer; those that are not special do not matter.
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
        self._lengths: dict[str, set[int]] = {}  # of the texts that begin with these two characters
        for text in self.texts:
            self._lengths.setdefault(text[:2], set()).add(len(text))
        rewritten = any(token.normalized for token in special.values())
        self._normalize = normalize if rewritten else None

    def render(
        self, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
    ) -> RenderedPrompt:
        """Renders messages, and finds the special tokens that users and tools spell.

        Raises:
            InputError: the messages cannot be rendered, or they spell special tokens and the template lets
                nobody see where these come out.
        """
        for _ in range(2):  # a template may write the time, which may have changed in between
            text = render(messages)
            for in_part in (True, False):
                if not self._marked(messages, "\0", in_part)[1]:
                    return RenderedPrompt(text)
                for mark in _marks(text):
                    boundaries = _boundaries(text, self._marked(messages, mark, in_part)[0], render, mark)
                    if boundaries is not None:
                        return RenderedPrompt(text, boundaries)
        raise InputError(
            "a user's or tool's message spells a special token of the model, and the chat template changes "
            "such text so that the token cannot be told from its own: remove the token from the message, or "
            "let it be a token with --special-tokens-in-content"
        )

    def encode(
        self, tokenizer: Tokenizer, prompt: RenderedPrompt, token_bytes: Callable[[int], bytes]
    ) -> list[int]:
        """The tokens of a rendered prompt. What users and tools spell is text, the rest is as ever."""
        [encoding] = tokenizer.encode_batch([prompt.text], add_special_tokens=False)
        ids: list[int] = []
        spelled: dict[str, list[int]] = {}
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            text = prompt.text[start:end]
            if self._is_match(token_id, text) and prompt.spans(start, end):
                if text not in spelled:
                    spelled[text] = self._as_text(tokenizer, text, token_bytes)
                ids += spelled[text]
            else:
                ids.append(token_id)
        return ids

    def _is_match(self, token_id: int, text: str) -> bool:
        """Whether the text spells the token; an unknown token stands for any text."""
        token = self.by_id.get(token_id)
        if token is None:
            return False
        texts = [text] if self._normalize is None else [text, self._normalize(text)]
        return any(one.strip() == token.content.strip() for one in texts)

    def _as_text(self, tokenizer: Tokenizer, text: str, token_bytes: Callable[[int], bytes]) -> list[int]:
        """The tokens of a text in the middle of another, none of them special."""
        tokenizer.encode_special_tokens = True  # which means: encode them as any text; this thread's copy
        try:
            ids = next(_spellings(tokenizer, text, token_bytes, self.by_id), None)
            if ids is None and len(text) > 1:
                parts = [
                    next(_spellings(tokenizer, character, token_bytes, self.by_id), None)
                    for character in text
                ]
                ids = None if None in parts else [one for part in parts for one in part or ()]
        finally:
            tokenizer.encode_special_tokens = False
        if ids is None:
            raise InputError(
                f"a user's or tool's message spells the special token {text!r}, which the tokenizer cannot "
                "write in other tokens: remove it, or let it be a token with --special-tokens-in-content"
            )
        return ids

    def _marked(self, messages: Sequence[Message], mark: str, in_part: bool) -> tuple[list[Message], bool]:
        """The messages with marks, and whether there are any.

        Args:
            messages: the messages.
            mark: what to put inside spellings.
            in_part: also mark where content begins or ends with a part of a special token, of which the
                template or another piece of content may have the rest.
        """
        marked = [
            message if message.get("role") in _TRUSTED_ROLES else self._with_marks(message, mark, in_part)
            for message in messages
        ]
        return marked, any(new != old for new, old in zip(marked, messages, strict=True))

    def _with_marks(self, value: Any, mark: str, in_part: bool, is_content: bool = False) -> Any:
        match value:
            case str():
                indices = self._inside(value) | (self._at_ends(value) if in_part and is_content else set())
                return _inserted(value, mark, indices) if indices else value
            case Mapping():
                return {
                    key: one
                    if key in _NOT_CONTENT
                    else self._with_marks(one, mark, in_part, key in ("content", "text"))
                    for key, one in value.items()
                }
            case list():
                return [self._with_marks(one, mark, in_part, is_content) for one in value]
        return value

    def _inside(self, text: str) -> set[int]:
        """An index inside each special token that the text spells."""
        indices: set[int] = set()
        for beginning, lengths in self._lengths.items():
            start = text.find(beginning)
            while start >= 0:
                if any(text[start : start + length] in self.texts for length in lengths):
                    indices |= {start, start + 1} if len(beginning) == 1 else {start + 1}
                start = text.find(beginning, start + 1)
        if not indices and self._normalize is not None:
            rewritten = self._normalize(text)
            if any(one in rewritten for one in self.texts):
                indices = set(range(len(text) + 1))
        return indices

    def _at_ends(self, text: str) -> set[int]:
        """The text's beginning, where a special token ends so; its end, where one begins so."""
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


def _marks(text: str) -> Iterator[str]:
    """Marks that the text does not have: one that no letter is, and one that survives escapes."""
    yield next(chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in text)
    yield next(f"q{number}z" for number in range(10**6) if f"q{number}z" not in text)


def _boundaries(
    text: str, marked: Sequence[Message], render: Callable[[Sequence[Message]], str], mark: str
) -> list[int] | None:
    """Where marks come out in ``text``; None where it is another text with them."""
    try:
        pieces = render(marked).split(mark)
    except InputError:
        return None
    if "".join(pieces) != text:
        return None
    boundaries, index = [], 0
    for piece in pieces[:-1]:
        index += len(piece)
        boundaries.append(index)
    return boundaries


def _inserted(text: str, mark: str, indices: Iterable[int]) -> str:
    cuts = [0, *sorted(indices), len(text)]
    return mark.join(text[start:end] for start, end in pairwise(cuts))


def _spellings(
    tokenizer: Tokenizer, text: str, token_bytes: Callable[[int], bytes], special: Mapping[int, AddedToken]
) -> Iterator[list[int]]:
    """Tokens of the text without special ones: first those of exactly this text, then as it is rewritten."""
    alone: list[int] = []
    for before in _ANCHORS:
        head = tokenizer.encode(before, add_special_tokens=False).ids if before else []
        ids = tokenizer.encode(before + text, add_special_tokens=False).ids
        if ids[: len(head)] != head or not special.keys().isdisjoint(ids):
            continue
        alone = alone or ids[len(head) :]
        if b"".join(map(token_bytes, ids[len(head) :])) == text.encode():
            yield ids[len(head) :]
    if alone:
        yield alone
