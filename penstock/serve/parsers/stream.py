"""Incremental text: readers process text that arrives in chunks.

A reader is a generator that yields when it needs more text. Its decisions do not depend on the chunk
boundaries, so the events are the same for every chunking.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reader: yields when it needs more text, and returns its result."""

SPACE = " \t\r\n"
_RUN_OF_SPACE = re.compile(r"[ \t\r\n]+")


class NotAToolCallError(Exception):
    """The text is not a tool call. The part that was not emitted yet is plain text."""


class MarkerSearch:
    """Searches a text for markers. If several markers match at a position, the longest is found."""

    def __init__(self, markers: Iterable[str]) -> None:
        ordered_markers = sorted(
            {marker for marker in markers if marker}, key=lambda marker: (-len(marker), marker)
        )
        self._search = re.compile("|".join(map(re.escape, ordered_markers)) or r"(?!)")
        self._beginnings = frozenset(
            marker[:end] for marker in ordered_markers for end in range(1, len(marker))
        )
        self._longest = max(map(len, ordered_markers), default=0)

    def find(self, text: str, at: int, ended: bool, limit: int | None = None) -> tuple[int, int]:
        """Return the span (start, end) of the first marker from position `at`; start == end if there is none.

        The text before `start` certainly contains no marker. Without a marker, `start` is the end of the
        text, or the position from which later text may complete a marker, unless the text has `ended`. With a
        `limit`, at most that many characters are searched.
        """
        if limit is not None and len(text) - at >= limit + self._longest:
            last = at + limit
            match = self._search.search(text, at, last + self._longest)
            return match.span() if match is not None and match.start() < last else (last, last)
        open_at = len(text) if ended else self._open_end(text, at)
        match = self._search.search(text, at)
        if match is None or match.start() >= open_at:
            return open_at, open_at
        return match.span()

    def _open_end(self, text: str, at: int) -> int:
        for start in range(max(at, len(text) - self._longest + 1), len(text)):
            if text[start:] in self._beginnings:
                return start
        return len(text)


class IncrementalText:
    """The text of one choice, consumed from the front.

    ``taken`` is the text consumed since the last `forget`. If the text is not a call, it becomes content.
    """

    def __init__(self) -> None:
        self.ended = False
        self.num_examined = 0  # tests check that this grows linearly with the text length
        self._text = ""
        self._at = 0
        self._taken_texts: list[str] = []

    def push(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def take(self, count: int) -> str:
        """Take the next `count` characters, which must be available."""
        text = self._text[self._at : self._at + count]
        assert len(text) == count, "the text is not available yet"
        self._at += count
        self._taken_texts.append(text)
        return text

    @property
    def taken(self) -> str:
        return "".join(self._taken_texts)

    def put_back(self, count: int) -> None:
        """Undo the last `take`, which took `count` characters."""
        assert len(self._taken_texts[-1]) == count
        self._taken_texts.pop()
        self._at -= count

    def take_rest(self) -> str:
        """Take all available text."""
        return self.take(len(self._text) - self._at)

    def forget(self) -> None:
        self._taken_texts.clear()

    def available(self) -> Steps[tuple[str, int]]:
        """Return (text, position of its unread part). The unread part is empty only after the end."""
        while self._at >= len(self._text) and not self.ended:
            yield
        return self._text, self._at

    def peek(self) -> Steps[str]:
        """Return the next character; "" at the end of the text."""
        text, at = yield from self.available()
        self.num_examined += 1
        return text[at : at + 1]

    def accept(self, *literals: str) -> Steps[str]:
        """Take and return the first of the literals that comes next in the text; "" if none does."""
        for literal in literals:
            while True:
                next_text = self._text[self._at : self._at + len(literal)]
                self.num_examined += len(next_text)
                if next_text == literal:
                    return self.take(len(literal))
                if self.ended or not literal.startswith(next_text):
                    break
                yield
        return ""

    def expect(self, *literals: str) -> Steps[str]:
        literal = yield from self.accept(*literals)
        if not literal:
            raise NotAToolCallError
        return literal

    def skip_space(self) -> Steps[str]:
        """Take all white space."""
        parts: list[str] = []
        while True:
            text, at = yield from self.available()
            match = _RUN_OF_SPACE.match(text, at)
            if match is None:
                self.num_examined += 1
                return "".join(parts)
            self.num_examined += match.end() - at
            parts.append(self.take(match.end() - at))

    def until(self, end: MarkerSearch, max_length: int) -> Steps[str]:
        """Take the text before the next end marker, and the marker. Return the text.

        Raises:
            NotAToolCallError: the text is longer than `max_length`, or no marker ends it.
        """
        parts: list[str] = []
        size = 0
        while True:
            # Take at most `max_length` + 1 characters. Otherwise the taken text would depend on the chunking.
            text, marker = yield from self.text_or_marker(end, max_length + 1 - size)
            parts.append(text)
            size += len(text)
            if marker:
                return "".join(parts)
            if not text or size > max_length:
                raise NotAToolCallError

    def run(self, pattern: re.Pattern[str], max_length: int) -> Steps[str]:
        """Take and return the longest run of characters that match `pattern`, a repeated character class.

        Raises:
            NotAToolCallError: there are none, or more than `max_length`.
        """
        parts: list[str] = []
        size = 0
        while True:
            text, at = yield from self.available()
            match = pattern.match(text, at, at + max_length + 1 - size)
            count = 0 if match is None else match.end() - at
            self.num_examined += count + 1
            if count:
                parts.append(self.take(count))
                size += count
            if size > max_length or (not size and at + count < len(text)) or at == len(text):
                raise NotAToolCallError  # an empty run at the end may still grow
            if at + count < len(text):
                return "".join(parts)

    def text_or_marker(self, markers: MarkerSearch, limit: int | None = None) -> Steps[tuple[str, str]]:
        """Take the available text before the next marker, or the marker if it is next.

        With a `limit`, which is at least 1, take at most that many characters of text.

        Returns:
            (text, ""), or ("", marker), or ("", "") at the end.
        """
        while True:
            text, at = yield from self.available()
            start, end = markers.find(text, at, self.ended, limit)
            self.num_examined += max(end, start + 1) - at
            if start > at:
                count = start - at
                return self.take(count if limit is None else min(count, limit)), ""
            if end > start:
                return "", self.take(end - start)
            if self.ended:
                return "", ""
            yield


def is_finished(steps: Steps[None]) -> bool:
    """Run a reader until it needs more text. Return whether it has finished."""
    try:
        next(steps)
    except StopIteration:
        return True
    return False
