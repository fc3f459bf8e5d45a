"""The scanner of one JSON value."""

from __future__ import annotations

import re
from typing import ClassVar

from penstock.serve.parsers.stream import IncrementalText, Reader
from penstock.serve.parsers.value_scanner import HEX_DIGITS, MAX_WORD_LENGTH, NUMBER, ValueScanner, scan_value

_NUMBER_RUN = re.compile(r"[0-9+\-.eE]+")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CONTROL_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


class JsonScanner(ValueScanner):
    """Scans a JSON value as defined by RFC 8259, and writes the text of the value.

    The text is unchanged except for control characters in strings. RFC 8259 forbids these characters, but
    models write them, mostly line ends. The scanner accepts them and writes them as escapes.
    """

    STRING_RUNS: ClassVar = {'"': re.compile(r'[^"\\\x00-\x1f]+')}
    CLOSERS: ClassVar = {"{": "}", "[": "]"}
    TRAILING_COMMA: ClassVar = False

    def __init__(self) -> None:
        super().__init__()
        self._remaining = ""  # the characters of a literal that must follow, or one "0" per missing hex digit
        self._number_parts: list[str] = []

    def _write_space(self, char: str) -> None:
        self._json_parts.append(char)

    def _write_colon(self) -> None:
        self._json_parts.append(":")

    def _process_comma(self) -> None:
        self._json_parts.append(",")

    def _open_bracket(self, char: str) -> None:
        self._json_parts.append(char)

    def _close_bracket(self, char: str) -> None:
        self._json_parts.append(char)

    def _begin_string(self) -> None:
        self._json_parts.append('"')

    def _write_in_string(self, text: str) -> None:
        is_control = len(text) == 1 and text < " "
        self._json_parts.append((_CONTROL_ESCAPES.get(text) or f"\\u{ord(text):04x}") if is_control else text)

    def _begin_escape(self) -> None:
        self._json_parts.append("\\")

    def _scan_escape(self, text: str, position: int) -> int:
        char = text[position]
        if self._inside == "escape" and char == "u":
            self._inside, self._remaining = "hex", "0000"
        elif self._inside == "escape" and char in '"\\/bfnrt':
            self._inside = "string"
        elif self._inside == "hex" and char in HEX_DIGITS:
            self._remaining = self._remaining[1:]
            self._inside = "hex" if self._remaining else "string"
        else:
            self.is_invalid = True
            return position
        self._json_parts.append(char)
        return position + 1

    def _begin_word(self, char: str) -> bool:
        if char in _LITERALS:
            self._inside, self._remaining = "literal", _LITERALS[char]
        elif char in "-0123456789":
            self._inside, self._number_parts = "word", []
        else:
            return False
        return True

    def _scan_word(self, text: str, position: int) -> int:
        return (
            self._scan_literal(text, position)
            if self._inside == "literal"
            else self._scan_number(text, position)
        )

    def _scan_literal(self, text: str, position: int) -> int:
        if text[position] != self._remaining[0]:
            self.is_invalid = True
            return position
        self._json_parts.append(text[position])
        self._remaining = self._remaining[1:]
        if not self._remaining:
            self._end_value()
        return position + 1

    def _scan_number(self, text: str, position: int) -> int:
        run = _NUMBER_RUN.match(text, position)
        if run is not None:
            self._number_parts.append(run.group())
            self._json_parts.append(run.group())
            return run.end()
        # The current character is not part of the number, so the number is complete.
        number = "".join(self._number_parts)
        self.is_invalid = len(number) > MAX_WORD_LENGTH or NUMBER.fullmatch(number) is None
        self._end_value()
        return position


def json_value(stream: IncrementalText) -> Reader[str]:
    """Take one JSON value from the stream and return its text.

    Raises:
        NotAToolCallError: the text is not a JSON value, or the text ends inside the value.
    """
    parts: list[str] = []
    yield from scan_value(stream, JsonScanner(), parts.append)
    return "".join(parts)
