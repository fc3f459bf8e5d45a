"""One JSON value, checked character by character while it is passed on."""

from __future__ import annotations

import re
from typing import Literal

from penstock.serve.parsers.stream import SPACE, IncrementalText, NotAToolCallError, Steps

MAX_DEPTH = 128  # json.loads and many a client's parser go no deeper than some hundreds
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER_RUN = re.compile(r"[0-9+\-.eE]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
_MAX_NUMBER = 4096  # characters; Python reads no integer of more than 4300 digits

_Want = Literal["value", "value or ]", "key", "key or }", ":", ", or end"]
_Inside = Literal["", "string", "escape", "hex", "number", "literal"]


class JsonScanner:
    """A value as RFC 8259 has it, but for one thing that models get wrong and that has only one meaning:
    control characters in strings, raw line ends above all, come out escaped.

    Feed it text until it is ``done`` or ``broken``. Its work is linear in the text.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._closers: list[str] = []
        self._want: _Want = "value"
        self._inside: _Inside = ""
        self._is_key = False
        self._rest = ""  # of a literal; the hex digits still to come
        self._number: list[str] = []

    def feed(self, text: str, at: int = 0) -> tuple[int, str]:
        """Reads `text` from `at` on.

        Returns:
            The position after the last character that belongs to the value, and the text of what was read.
        """
        out: list[str] = []
        while at < len(text) and not self.done and not self.broken:
            match self._inside:
                case "string":
                    at = self._string(text, at, out)
                case "escape" | "hex":
                    at = self._escape(text, at, out)
                case "number":
                    at = self._digits(text, at, out)
                case "literal":
                    at = self._literal(text, at, out)
                case _:
                    at = self._structure(text, at, out)
        return at, "".join(out)

    def _structure(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        if char in SPACE:
            pass
        elif char == '"' and self._want not in (":", ", or end"):
            self._is_key = self._want.startswith("key")
            self._inside = "string"
        elif self._want in ("value", "value or ]") and char in "{[" and len(self._closers) < MAX_DEPTH:
            self._closers.append("}" if char == "{" else "]")
            self._want = "key or }" if char == "{" else "value or ]"
        elif self._want in ("value", "value or ]") and char in _LITERALS:
            self._inside, self._rest = "literal", _LITERALS[char][1:]
        elif self._want in ("value", "value or ]") and char in "-0123456789":
            self._inside, self._number = "number", []
            return at  # all of a number is read in one place
        elif char == ":" and self._want == ":":
            self._want = "value"
        elif char == "," and self._want == ", or end":
            self._want = "key" if self._closers[-1] == "}" else "value"
        elif char in self._closers[-1:] and self._want in (", or end", "key or }", "value or ]"):
            self._closers.pop()
            self._end_value()
        else:
            self.broken = True
            return at
        out.append(char)
        return at + 1

    def _end_value(self) -> None:
        self._inside = ""
        self._want = ", or end"
        self.done = not self._closers

    def _string(self, text: str, at: int, out: list[str]) -> int:
        match = _STRING_RUN.match(text, at)
        if match is not None:
            out.append(match.group())
            return match.end()
        char = text[at]
        if char == '"':
            out.append(char)
            if self._is_key:
                self._inside, self._want = "", ":"
            else:
                self._end_value()
        elif char == "\\":
            out.append(char)
            self._inside, self._rest = "escape", ""
        else:
            out.append(_CONTROL.get(char) or f"\\u{ord(char):04x}")
        return at + 1

    def _escape(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        if self._inside == "escape" and char == "u":
            self._inside, self._rest = "hex", "0000"
        elif self._inside == "escape" and char in '"\\/bfnrt':
            self._inside = "string"
        elif self._inside == "hex" and char in "0123456789abcdefABCDEF":
            self._rest = self._rest[1:]
            self._inside = "hex" if self._rest else "string"
        else:
            self.broken = True
            return at
        out.append(char)
        return at + 1

    def _digits(self, text: str, at: int, out: list[str]) -> int:
        match = _NUMBER_RUN.match(text, at)
        if match is not None:
            self._number.append(match.group())
            out.append(match.group())
            return match.end()
        number = "".join(self._number)  # ends at the first character that is not its own
        self.broken = len(number) > _MAX_NUMBER or _NUMBER.fullmatch(number) is None
        self._end_value()
        return at

    def _literal(self, text: str, at: int, out: list[str]) -> int:
        if text[at] != self._rest[0]:
            self.broken = True
            return at
        out.append(text[at])
        self._rest = self._rest[1:]
        if not self._rest:
            self._end_value()
        return at + 1


def json_value(stream: IncrementalText) -> Steps[str]:
    """Takes one JSON value and returns its text.

    Raises:
        NotAToolCallError: what stands here is none, or the text ends in it.
    """
    value = JsonScanner()
    pieces = []
    while not value.done:
        text, at = yield from stream.available()
        end, piece = value.feed(text, at)
        stream.num_looked_at += end - at + 1
        stream.take(end - at)
        pieces.append(piece)
        if value.broken or at == len(text):
            raise NotAToolCallError
    if value.broken:
        raise NotAToolCallError
    return "".join(pieces)
