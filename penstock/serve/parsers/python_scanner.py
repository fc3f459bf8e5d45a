"""One Python literal, made JSON text character by character: models of some families call tools in Python."""

from __future__ import annotations

import json
import math
import re
from typing import Literal

from penstock.serve.parsers.json_scanner import MAX_DEPTH
from penstock.serve.parsers.stream import SPACE

_STRING_RUNS = {"'": re.compile(r"[^'\\\x00-\x1f]+"), '"': re.compile(r'[^"\\\x00-\x1f]+')}
_WORD_RUN = re.compile(r"[0-9A-Za-z_+\-.]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NAMES = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_MAX_WORD = 4096

_Want = Literal["value", "value or end", "key or end", ":", ", or end"]
_OCTAL = "01234567"
_Inside = Literal["", "string", "escape", "hex", "octal", "word"]


class PythonScanner:
    """Strings, numbers, ``True``, ``False``, ``None`` (and JSON's names for them), lists, tuples and
    dictionaries with strings for keys. Feed it text until it is ``done`` or ``broken``."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._closers: list[str] = []
        self._want: _Want = "value"
        self._inside: _Inside = ""
        self._is_key = False
        self._comma = ""  # JSON takes none before a closer: it is written with the value after it
        self._quote = ""
        self._word: list[str] = []
        self._hex = ""  # the digits of an escape, hexadecimal or octal
        self._hex_length = 0
        # One for each open parenthesis that no comma has made a tuple yet: what was written in it.
        self._grouped: list[list[str]] = []
        self._is_group: list[bool] = []  # for each of `_closers`, whether `_grouped` has a list for it

    def feed(self, text: str, at: int = 0) -> tuple[int, str]:
        """Reads `text` from `at` on.

        Returns:
            The position after the last character that belongs to the value, and JSON text of what was read.
        """
        written: list[str] = []
        while at < len(text) and not self.done and not self.broken:
            out = self._grouped[-1] if self._grouped else written
            match self._inside:
                case "string":
                    at = self._string(text, at, out)
                case "escape" | "hex" | "octal":
                    at = self._escape(text, at, out)
                case "word":
                    at = self._words(text, at, out)
                case _:
                    at = self._structure(text, at, out, written)
        return at, "".join(written)

    def _structure(self, text: str, at: int, out: list[str], written: list[str]) -> int:
        char = text[at]
        wants_value = self._want in ("value", "value or end")
        if char in SPACE:
            pass
        elif char in "'\"" and (wants_value or self._want == "key or end"):
            self._is_key = self._want == "key or end"
            self._inside, self._quote = "string", char
            self._write(out, '"')
        elif wants_value and char in _CLOSERS and len(self._closers) < MAX_DEPTH:
            self._open(char, out)
        elif wants_value and _WORD_RUN.match(char):
            self._inside, self._word = "word", []
            return at
        elif char == ":" and self._want == ":":
            self._want = "value"
            out.append(": ")
        elif char == "," and self._want == ", or end":
            if self._is_group[-1]:
                self._end_group(written, is_tuple=True)
            self._want = "key or end" if self._closers[-1] == "}" else "value or end"
            self._comma = ", "
        elif char in self._closers[-1:] and self._want.endswith("end"):
            self._close(out, written)
        else:
            self.broken = True
            return at
        return at + 1

    def _open(self, char: str, out: list[str]) -> None:
        self._closers.append(_CLOSERS[char])
        self._is_group.append(char == "(")
        self._want = "key or end" if char == "{" else "value or end"
        if char == "(":
            self._write(out, "")
            self._grouped.append([])
        else:
            self._write(out, char)

    def _close(self, out: list[str], written: list[str]) -> None:
        if self._is_group[-1]:
            is_empty = self._want == "value or end"
            self._end_group(written, is_tuple=is_empty)
            if is_empty:
                (self._grouped[-1] if self._grouped else written).append("]")
        else:
            out.append("}" if self._closers[-1] == "}" else "]")
        self._closers.pop()
        self._is_group.pop()
        self._comma = ""
        self._end_value()

    def _end_group(self, written: list[str], *, is_tuple: bool) -> None:
        """Passes on what was held back since an open parenthesis: a tuple, or one value in parentheses."""
        self._is_group[-1] = False
        held = self._grouped.pop()
        out = self._grouped[-1] if self._grouped else written
        out += ["[", *held] if is_tuple else held

    def _write(self, out: list[str], text: str) -> None:
        out.append(self._comma + text)
        self._comma = ""

    def _end_value(self) -> None:
        self._inside = ""
        self._want = ", or end"
        self.done = not self._closers

    def _string(self, text: str, at: int, out: list[str]) -> int:
        match = _STRING_RUNS[self._quote].match(text, at)
        if match is not None:
            out.append(_in_json_string(match.group()))
            return match.end()
        char = text[at]
        if char == self._quote:
            out.append('"')
            if self._is_key:
                self._inside, self._want = "", ":"
            else:
                self._end_value()
        elif char == "\\":
            self._inside = "escape"
        else:
            out.append(_in_json_string(char))
        return at + 1

    def _escape(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        if self._inside == "hex":
            if char not in "0123456789abcdefABCDEF":
                self.broken = True
                return at
            self._hex += char
            if len(self._hex) == self._hex_length:
                self._character(int(self._hex, 16), out)
        elif char in _OCTAL and (self._inside == "escape" or len(self._hex) < 3):
            self._inside, self._hex = "octal", (self._hex if self._inside == "octal" else "") + char
        elif self._inside == "octal":
            self._character(int(self._hex, 8), out)
            return at
        elif char in _HEX_LENGTHS:
            self._inside, self._hex, self._hex_length = "hex", "", _HEX_LENGTHS[char]
        else:
            # Python keeps the backslash of an escape that it does not know.
            plain = char if char in "'\"\\" else _ESCAPES.get(char, f"\\{char}")
            out.append(_in_json_string(plain))
            self._inside = "string"
        return at + 1

    def _character(self, code: int, out: list[str]) -> None:
        self._inside = "string"
        if code > 0x10FFFF:
            self.broken = True
        elif 0xD800 <= code <= 0xDFFF:  # half of a pair: JSON joins the escapes of both
            out.append(f"\\u{code:04x}")
        else:
            out.append(_in_json_string(chr(code)))

    def _words(self, text: str, at: int, out: list[str]) -> int:
        match = _WORD_RUN.match(text, at)
        if match is not None:
            self._word.append(match.group())
            return match.end()
        word = _json_word("".join(self._word))
        if word is None:
            self.broken = True
        else:
            self._write(out, word)
            self._end_value()
        return at


def _in_json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_word(word: str) -> str | None:
    if word in _NAMES:
        return _NAMES[word]
    if len(word) > _MAX_WORD:
        return None
    if _NUMBER.fullmatch(word):
        return word
    try:
        number = float(word)  # also "1_000", ".5", "+1"
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return str(int(word)) if word.lstrip("+-").replace("_", "").isdigit() else repr(number)
