"""The base class of `JsonScanner` and `PythonScanner`: structure, strings and nesting."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from penstock.serve.parsers.stream import SPACE, IncrementalText, NotAToolCallError, Reader

MAX_DEPTH = 128  # levels; json.loads and the parsers of many clients support only a few hundred
MAX_WORD_LENGTH = 4096  # characters; Python's limit is 4300 digits
HEX_DIGITS = "0123456789abcdefABCDEF"
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")

_ExpectedSyntax = Literal["value", "value or end", "key", "key or end", ":", ", or end"]
"""What may follow at the current position."""
_Inside = Literal["", "string", "escape", "hex", "octal", "word", "literal"]
"""The token at the current position; "" between tokens. A word is a number or a name."""


class ValueScanner(ABC):
    """Scans one value and writes it as JSON.

    The caller passes text to `feed` until ``is_complete`` or ``is_invalid`` is True. The run time is linear
    in the length of the text. A subclass defines the syntax of literals (strings, numbers, names) and
    the JSON text to write.
    """

    STRING_RUNS: ClassVar[Mapping[str, re.Pattern[str]]]
    """Quote character -> pattern of a run of ordinary characters in a string with that quote."""
    CLOSERS: ClassVar[Mapping[str, str]]
    """Opening bracket -> closing bracket."""
    TRAILING_COMMA: ClassVar[bool]
    """Whether a comma is allowed before a closing bracket."""

    def __init__(self) -> None:
        self.is_complete = False
        self.is_invalid = False
        self._closers: list[str] = []
        self._expected_syntax: _ExpectedSyntax = "value"
        self._inside: _Inside = ""
        self._is_key = False
        self._quote = ""
        self._json_parts: list[str] = []

    def feed(self, text: str, position: int = 0) -> tuple[int, str]:
        """Scan `text` from `position` on.

        Returns:
            The position of the first character that was not scanned, and the JSON text of the scanned part.
        """
        self._json_parts = []
        while position < len(text) and not self.is_complete and not self.is_invalid:
            match self._inside:
                case "":
                    position = self._scan_structure(text, position)
                case "string":
                    position = self._scan_string(text, position)
                case "escape" | "hex" | "octal":
                    position = self._scan_escape(text, position)
                case _:
                    position = self._scan_word(text, position)
        return position, "".join(self._json_parts)

    def _scan_structure(self, text: str, position: int) -> int:
        char = text[position]
        expected_syntax = self._expected_syntax
        is_value = expected_syntax in ("value", "value or end")
        if char in SPACE:
            self._write_space(char)
        elif char in self.STRING_RUNS and expected_syntax not in (":", ", or end"):
            self._is_key = not is_value
            self._inside, self._quote = "string", char
            self._begin_string()
        elif is_value and char in self.CLOSERS and len(self._closers) < MAX_DEPTH:
            self._closers.append(self.CLOSERS[char])
            self._expected_syntax = "key or end" if char == "{" else "value or end"
            self._open_bracket(char)
        elif is_value and self._begin_word(char):
            return position  # `_scan_word` reads the whole word
        elif char == ":" and expected_syntax == ":":
            self._expected_syntax = "value"
            self._write_colon()
        elif char == "," and expected_syntax == ", or end":
            self._process_comma()
            self._expected_syntax = self._after_comma()
        elif char in self._closers[-1:] and expected_syntax.endswith("end"):
            self._close_bracket(char)
            self._closers.pop()
            self._end_value()
        else:
            self.is_invalid = True
            return position
        return position + 1

    def _after_comma(self) -> _ExpectedSyntax:
        if self._closers[-1] == "}":
            return "key or end" if self.TRAILING_COMMA else "key"
        return "value or end" if self.TRAILING_COMMA else "value"

    def _end_value(self) -> None:
        self._inside = ""
        self._expected_syntax = ", or end"
        self.is_complete = not self._closers

    def _scan_string(self, text: str, position: int) -> int:
        run = self.STRING_RUNS[self._quote].match(text, position)
        if run is not None:
            self._write_in_string(run.group())
            return run.end()
        char = text[position]
        if char == self._quote:
            self._emit('"')
            if self._is_key:
                self._inside, self._expected_syntax = "", ":"
            else:
                self._end_value()
        elif char == "\\":
            self._inside = "escape"
            self._begin_escape()
        else:
            self._write_in_string(char)
        return position + 1

    def _emit(self, text: str) -> None:
        """Write JSON text."""
        self._json_parts.append(text)

    @abstractmethod
    def _write_space(self, char: str) -> None:
        """Write white space between tokens, or drop it."""

    @abstractmethod
    def _write_colon(self) -> None:
        """Write the colon after a key."""

    @abstractmethod
    def _process_comma(self) -> None:
        """Process a comma between two values."""

    @abstractmethod
    def _open_bracket(self, char: str) -> None:
        """Process an opening bracket; its closing bracket is already on the stack."""

    @abstractmethod
    def _close_bracket(self, char: str) -> None:
        """Process a closing bracket, which is still on the stack."""

    @abstractmethod
    def _begin_string(self) -> None:
        """Write the opening quote of a string."""

    @abstractmethod
    def _write_in_string(self, text: str) -> None:
        """Write a run of ordinary characters or one control character of a string."""

    @abstractmethod
    def _begin_escape(self) -> None:
        """Process the backslash of an escape."""

    @abstractmethod
    def _scan_escape(self, text: str, position: int) -> int:
        """Scan one character after a backslash. Return the next position."""

    @abstractmethod
    def _begin_word(self, char: str) -> bool:
        """Return whether a number or a name begins with `char`; if so, set the scanner's state."""

    @abstractmethod
    def _scan_word(self, text: str, position: int) -> int:
        """Scan part of a number or a name. Return the next position."""


def scan_value(stream: IncrementalText, scanner: ValueScanner, write: Callable[[str], None]) -> Reader[None]:
    """Take one value from the stream. Pass its JSON text to `write` as it arrives.

    Raises:
        NotAToolCallError: the text is not a value, or the text ends inside the value.
    """
    while not scanner.is_complete:
        text, position = yield from stream.wait_for_text()
        end, json_text = scanner.feed(text, position)
        stream.num_examined += end - position + 1
        stream.take(end - position)
        write(json_text)
        if scanner.is_invalid or position == len(text):
            raise NotAToolCallError
