"""The scanner of one JSON value."""

from __future__ import annotations

import re
from typing import ClassVar

from penstock.serve.parsers.stream import IncrementalText, Steps
from penstock.serve.parsers.value_scanner import HEX_DIGITS, MAX_WORD, NUMBER, ValueScanner, scan_value

_NUMBER_RUN = re.compile(r"[0-9+\-.eE]+")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


class JsonScanner(ValueScanner):
    """Scans a value as defined by RFC 8259, and writes its text unchanged, with one exception.

    RFC 8259 forbids control characters in strings. Models write them, mostly line ends, and their meaning is
    clear. The scanner accepts them and emits escapes.
    """

    STRING_RUNS: ClassVar = {'"': re.compile(r'[^"\\\x00-\x1f]+')}
    CLOSERS: ClassVar = {"{": "}", "[": "]"}
    TRAILING_COMMA: ClassVar = False

    def __init__(self) -> None:
        super().__init__()
        self._remaining = ""  # expected rest of a literal, or one placeholder per missing hex digit
        self._number: list[str] = []

    def _write_space(self, char: str) -> None:
        self._out.append(char)

    def _write_colon(self) -> None:
        self._out.append(":")

    def _comma(self) -> None:
        self._out.append(",")

    def _open(self, char: str) -> None:
        self._out.append(char)

    def _close(self, char: str) -> None:
        self._out.append(char)

    def _begin_string(self) -> None:
        self._out.append('"')

    def _write_in_string(self, text: str) -> None:
        is_control = len(text) == 1 and text < " "
        self._out.append((_CONTROL.get(text) or f"\\u{ord(text):04x}") if is_control else text)

    def _begin_escape(self) -> None:
        self._out.append("\\")

    def _scan_escape(self, text: str, at: int) -> int:
        char = text[at]
        if self._inside == "escape" and char == "u":
            self._inside, self._remaining = "hex", "0000"
        elif self._inside == "escape" and char in '"\\/bfnrt':
            self._inside = "string"
        elif self._inside == "hex" and char in HEX_DIGITS:
            self._remaining = self._remaining[1:]
            self._inside = "hex" if self._remaining else "string"
        else:
            self.broken = True
            return at
        self._out.append(char)
        return at + 1

    def _begin_word(self, char: str) -> bool:
        if char in _LITERALS:
            self._inside, self._remaining = "literal", _LITERALS[char]
        elif char in "-0123456789":
            self._inside, self._number = "word", []
        else:
            return False
        return True

    def _scan_word(self, text: str, at: int) -> int:
        return self._scan_literal(text, at) if self._inside == "literal" else self._scan_number(text, at)

    def _scan_literal(self, text: str, at: int) -> int:
        if text[at] != self._remaining[0]:
            self.broken = True
            return at
        self._out.append(text[at])
        self._remaining = self._remaining[1:]
        if not self._remaining:
            self._end_value()
        return at + 1

    def _scan_number(self, text: str, at: int) -> int:
        run = _NUMBER_RUN.match(text, at)
        if run is not None:
            self._number.append(run.group())
            self._out.append(run.group())
            return run.end()
        number = "".join(self._number)  # the number is complete: the current character is not part of it
        self.broken = len(number) > MAX_WORD or NUMBER.fullmatch(number) is None
        self._end_value()
        return at


def json_value(stream: IncrementalText) -> Steps[str]:
    """Take one JSON value from the stream and return its text.

    Raises:
        NotAToolCallError: the text is not a JSON value, or the text ends inside the value.
    """
    parts: list[str] = []
    yield from scan_value(stream, JsonScanner(), parts.append)
    return "".join(parts)
