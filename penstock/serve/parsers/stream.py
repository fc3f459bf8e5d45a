"""Incremental parsing: readers process text that arrives in chunks.

A reader is a generator that yields when it needs more text. It takes characters from the front of the text.
Its results do not depend on the chunk boundaries, so the events are the same for every chunking.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Reader = Generator[None, None, T]
"""The type of a reader. It yields when it needs more text, and returns a result of type T."""

SPACE = " \t\r\n"
_RUN_OF_SPACE = re.compile(r"[ \t\r\n]+")


class NotAToolCallError(Exception):
    """The text is not a tool call. The taken text, which has not been emitted, becomes content."""


class MarkerSearch:
    """Searches a text for markers. If several markers match at a position, the longest marker counts."""

    def __init__(self, markers: Iterable[str]) -> None:
        ordered_markers = sorted(
            {marker for marker in markers if marker}, key=lambda marker: (-len(marker), marker)
        )
        self._pattern = re.compile("|".join(map(re.escape, ordered_markers)) or r"(?!)")
        self._marker_prefixes = frozenset(
            marker[:end] for marker in ordered_markers for end in range(1, len(marker))
        )
        self._max_marker_length = max(map(len, ordered_markers), default=0)

    def find(self, text: str, position: int, has_ended: bool, limit: int | None = None) -> tuple[int, int]:
        """Return the span (start, end) of the first marker at or after `position`.

        If there is no marker, both positions are the end of the part that certainly contains no marker: the
        end of the text, the limit, or the beginning of an incomplete marker that later text may complete.

        Args:
            text: the available text.
            position: where the search begins.
            has_ended: whether no more text will arrive.
            limit: maximum number of characters before the marker.
        """
        if limit is not None and len(text) - position >= limit + self._max_marker_length:
            limit_end = position + limit
            match = self._pattern.search(text, position, limit_end + self._max_marker_length)
            return match.span() if match is not None and match.start() < limit_end else (limit_end, limit_end)
        possible_start = len(text) if has_ended else self._possible_marker_start(text, position)
        match = self._pattern.search(text, position)
        if match is None or match.start() >= possible_start:
            return possible_start, possible_start
        return match.span()

    def _possible_marker_start(self, text: str, position: int) -> int:
        for start in range(max(position, len(text) - self._max_marker_length + 1), len(text)):
            if text[start:] in self._marker_prefixes:
                return start
        return len(text)


class IncrementalText:
    """The text of one choice. Readers take characters from its front.

    If the taken text turns out not to be a call, the parser emits `taken_text` as content.
    """

    def __init__(self) -> None:
        self.has_ended = False
        # Number of examined characters. Tests check that it grows linearly with the length of the text.
        self.num_examined = 0
        self._text = ""
        self._position = 0
        self._taken_parts: list[str] = []

    def push(self, text: str) -> None:
        """Append text that has arrived."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def take(self, num_chars: int) -> str:
        """Take the next `num_chars` characters, which must be available."""
        text = self._text[self._position : self._position + num_chars]
        assert len(text) == num_chars, "the text is not available yet"
        self._position += num_chars
        self._taken_parts.append(text)
        return text

    @property
    def taken_text(self) -> str:
        """The text that was taken since the last `clear_taken`."""
        return "".join(self._taken_parts)

    def put_back(self, num_chars: int) -> None:
        """Undo the last `take`, which must have taken `num_chars` characters."""
        assert len(self._taken_parts[-1]) == num_chars
        self._taken_parts.pop()
        self._position -= num_chars

    def take_rest(self) -> str:
        """Take all available text."""
        return self.take(len(self._text) - self._position)

    def clear_taken(self) -> None:
        """Clear `taken_text`. The caller has emitted the text, or the text is markup."""
        self._taken_parts.clear()

    def wait_for_text(self) -> Reader[tuple[str, int]]:
        """Wait until text is available. Return (text, position of the first character that is not taken).

        The position is the end of the text only if the text has ended.
        """
        while self._position >= len(self._text) and not self.has_ended:
            yield
        return self._text, self._position

    def peek(self) -> Reader[str]:
        """Return the next character; "" at the end of the text."""
        text, position = yield from self.wait_for_text()
        self.num_examined += 1
        return text[position : position + 1]

    def accept(self, *literals: str) -> Reader[str]:
        """Take and return the first of the literals that the text continues with; "" if there is none."""
        for literal in literals:
            while True:
                next_text = self._text[self._position : self._position + len(literal)]
                self.num_examined += len(next_text)
                if next_text == literal:
                    return self.take(len(literal))
                if self.has_ended or not literal.startswith(next_text):
                    break
                yield
        return ""

    def expect(self, *literals: str) -> Reader[str]:
        """Take and return the first of the literals that the text continues with.

        Raises:
            NotAToolCallError: the text continues with none of the literals.
        """
        literal = yield from self.accept(*literals)
        if not literal:
            raise NotAToolCallError
        return literal

    def skip_space(self) -> Reader[str]:
        """Take and return all white space that comes next."""
        parts: list[str] = []
        while True:
            text, position = yield from self.wait_for_text()
            match = _RUN_OF_SPACE.match(text, position)
            if match is None:
                self.num_examined += 1
                return "".join(parts)
            self.num_examined += match.end() - position
            parts.append(self.take(match.end() - position))

    def take_until(self, end: MarkerSearch, max_length: int) -> Reader[str]:
        """Take the text up to and including the next end marker. Return the text without the marker.

        Raises:
            NotAToolCallError: the text before the marker is longer than `max_length`, or there is no marker.
        """
        parts: list[str] = []
        length = 0
        while True:
            # Take at most `max_length` + 1 characters. Otherwise the taken text would depend on the chunking.
            text, marker = yield from self.take_text_or_marker(end, max_length + 1 - length)
            parts.append(text)
            length += len(text)
            if marker:
                return "".join(parts)
            if not text or length > max_length:
                raise NotAToolCallError

    def take_run(self, pattern: re.Pattern[str], max_length: int) -> Reader[str]:
        """Take and return the longest run of characters that match `pattern`, a repeated character class.

        Raises:
            NotAToolCallError: the run is empty, longer than `max_length`, or ends at the end of the text.
        """
        parts: list[str] = []
        length = 0
        while True:
            text, position = yield from self.wait_for_text()
            match = pattern.match(text, position, position + max_length + 1 - length)
            match_length = 0 if match is None else match.end() - position
            match_end = position + match_length
            self.num_examined += match_length + 1
            if match_length:
                parts.append(self.take(match_length))
                length += match_length
            # An empty run is an error only if another character follows or the text has ended.
            if length > max_length or (not length and match_end < len(text)) or position == len(text):
                raise NotAToolCallError
            if match_end < len(text):
                return "".join(parts)

    def take_text_or_marker(self, markers: MarkerSearch, limit: int | None = None) -> Reader[tuple[str, str]]:
        """Take the available text before the next marker. If no text precedes the marker, take the marker.

        Args:
            markers: the markers to search.
            limit: maximum number of characters of text, at least 1.

        Returns:
            (text, ""), or ("", marker), or ("", "") at the end of the text.
        """
        while True:
            text, position = yield from self.wait_for_text()
            start, end = markers.find(text, position, self.has_ended, limit)
            self.num_examined += max(end, start + 1) - position
            if start > position:
                num_chars = start - position
                return self.take(num_chars if limit is None else min(num_chars, limit)), ""
            if end > start:
                return "", self.take(end - start)
            if self.has_ended:
                return "", ""
            yield


def advance(reader: Reader[None]) -> bool:
    """Run a reader until it needs more text or returns. Return whether it has returned."""
    try:
        next(reader)
    except StopIteration:
        return True
    return False
