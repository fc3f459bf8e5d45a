"""Text that comes in pieces, read as if it were all there: a reader waits where its next step needs more.

Readers are generators that yield when they want more text. What they decide depends on the text alone and
not on how it was cut: that is why any cutting gives the same events.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reader: yields whenever it needs more text, returns what it has read."""

SPACE = " \t\r\n"
_RUN_OF_SPACE = re.compile(r"[ \t\r\n]+")


class NotAToolCallError(Exception):
    """What was taken for a call is none. Its text, as far as nobody has seen it, is plain text."""


class Markers:
    """Strings to look for in a text, longer ones first."""

    def __init__(self, markers: Iterable[str]) -> None:
        ordered = sorted({marker for marker in markers if marker}, key=lambda marker: (-len(marker), marker))
        self._search = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._beginnings = frozenset(marker[:end] for marker in ordered for end in range(1, len(marker)))
        self._longest = max(map(len, ordered), default=0)

    def find(self, text: str, at: int, ended: bool, limit: int | None = None) -> tuple[int, int]:
        """Where the first marker from `at` on stands; start == end where none does.

        What lies before the start is certain to be no marker. The start is the text's end, or, unless
        the text has ended, the place from which later text may complete a marker. With a `limit`, no more
        than that many characters before the start are looked at.
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
    """The text of one answer, taken from the front.

    ``taken`` has what was taken since the last `forget`: a reader that finds that it was wrong gives it back.
    """

    def __init__(self) -> None:
        self.ended = False
        self.num_pushed = 0
        self.num_looked_at = 0  # characters that readers have examined: the cost, which tests hold to linear
        self._text = ""
        self._at = 0
        self._taken: list[str] = []

    def push(self, text: str) -> None:
        self.num_pushed += len(text)
        self._text = self._text[self._at :] + text
        self._at = 0

    def take(self, count: int) -> str:
        """The next `count` characters, which must be there."""
        text = self._text[self._at : self._at + count]
        assert len(text) == count, "text taken that has not come yet"
        self._at += count
        self._taken.append(text)
        return text

    @property
    def taken(self) -> str:
        return "".join(self._taken)

    def put_back(self, count: int) -> None:
        """Undoes the last `take`, which was of `count` characters."""
        assert len(self._taken[-1]) == count
        self._taken.pop()
        self._at -= count

    def take_rest(self) -> str:
        """All that has come and was not taken."""
        return self.take(len(self._text) - self._at)

    def forget(self) -> None:
        self._taken.clear()

    def available(self) -> Steps[tuple[str, int]]:
        """The text there is and where the unread part begins; at its end only if the stream has ended."""
        while self._at >= len(self._text) and not self.ended:
            yield
        return self._text, self._at

    def peek(self) -> Steps[str]:
        """The next character, "" at the end."""
        text, at = yield from self.available()
        self.num_looked_at += 1
        return text[at : at + 1]

    def accept(self, *literals: str) -> Steps[str]:
        """Takes the first of the literals that the text goes on with; "" if with none."""
        for literal in literals:
            while True:
                there = self._text[self._at : self._at + len(literal)]
                self.num_looked_at += len(there)
                if there == literal:
                    return self.take(len(literal))
                if self.ended or not literal.startswith(there):
                    break
                yield
        return ""

    def expect(self, *literals: str) -> Steps[str]:
        found = yield from self.accept(*literals)
        if not found:
            raise NotAToolCallError
        return found

    def skip_space(self) -> Steps[str]:
        """Takes white space, as much as there is."""
        pieces: list[str] = []
        while True:
            text, at = yield from self.available()
            match = _RUN_OF_SPACE.match(text, at)
            if match is None:
                self.num_looked_at += 1
                return "".join(pieces)
            self.num_looked_at += match.end() - at
            pieces.append(self.take(match.end() - at))

    def until(self, end: Markers, longest: int) -> Steps[str]:
        """Takes a short text and the marker behind it; returns the text.

        Raises:
            NotAToolCallError: it is longer than `longest`, or nothing ends it.
        """
        pieces: list[str] = []
        size = 0
        while True:
            # No more than the length that decides, or what is taken would depend on how the text was cut.
            text, marker = yield from self.piece(end, longest + 1 - size)
            pieces.append(text)
            size += len(text)
            if marker:
                return "".join(pieces)
            if not text or size > longest:
                raise NotAToolCallError

    def run(self, pattern: re.Pattern[str], longest: int) -> Steps[str]:
        """Takes the characters that all match `pattern` (one of a class, repeated).

        Raises:
            NotAToolCallError: there are none, or more than `longest`.
        """
        pieces: list[str] = []
        size = 0
        while True:
            text, at = yield from self.available()
            match = pattern.match(text, at, at + longest + 1 - size)
            count = 0 if match is None else match.end() - at
            self.num_looked_at += count + 1
            if count:
                pieces.append(self.take(count))
                size += count
            if size > longest or (not size and at + count < len(text)) or at == len(text):
                raise NotAToolCallError  # a run that the text's end cuts is not known to be whole
            if at + count < len(text):
                return "".join(pieces)

    def piece(self, markers: Markers, limit: int | None = None) -> Steps[tuple[str, str]]:
        """Takes text up to the next marker, as much as has come, or the marker if it stands here.

        With a `limit`, which is at least 1, it takes no more than that many characters of text.

        Returns:
            (text, ""), or ("", marker), or ("", "") at the end.
        """
        while True:
            text, at = yield from self.available()
            start, end = markers.find(text, at, self.ended, limit)
            self.num_looked_at += max(end, start + 1) - at
            if start > at:
                count = start - at
                return self.take(count if limit is None else min(count, limit)), ""
            if end > start:
                return "", self.take(end - start)
            if self.ended:
                return "", ""
            yield


def is_finished(steps: Steps[None]) -> bool:
    """Lets a reader go on until it waits for text; whether it has returned."""
    try:
        next(steps)
    except StopIteration:
        return True
    return False
