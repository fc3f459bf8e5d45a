"""The scanner of a Python literal, for models that write tool calls in Python."""

from __future__ import annotations

import json
import math
import re
from typing import ClassVar

from penstock.serve.parsers.value_scanner import HEX_DIGITS, MAX_WORD_LENGTH, NUMBER, ValueScanner

_WORD_RUN = re.compile(r"[0-9A-Za-z_+\-.]+")
_NAMES = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_OCTAL = "01234567"


class PythonScanner(ValueScanner):
    """Translates a Python literal to JSON.

    The literals are strings, numbers, ``True``, ``False``, ``None`` and their JSON names, lists, tuples, and
    dictionaries with string keys.
    """

    STRING_RUNS: ClassVar = {"'": re.compile(r"[^'\\\x00-\x1f]+"), '"': re.compile(r'[^"\\\x00-\x1f]+')}
    CLOSERS: ClassVar = {"{": "}", "[": "]", "(": ")"}
    TRAILING_COMMA: ClassVar = True

    def __init__(self) -> None:
        super().__init__()
        self._pending_comma = ""  # written before the next value, because JSON has no trailing commas
        self._word_parts: list[str] = []
        self._digits = ""  # digits of a hexadecimal or octal escape so far
        self._hex_length = 0
        # The JSON text inside each open parenthesis that had no comma yet. Parentheses with a comma are a
        # tuple, and parentheses without a comma enclose a single value.
        self._groups: list[list[str]] = []
        # Whether the open bracket at the same index of `_closers` has an entry in `_groups`.
        self._is_group: list[bool] = []

    def _emit(self, text: str) -> None:
        (self._groups[-1] if self._groups else self._json_parts).append(text)

    def _emit_value(self, text: str) -> None:
        self._emit(self._pending_comma + text)
        self._pending_comma = ""

    def _write_space(self, char: str) -> None:
        pass

    def _write_colon(self) -> None:
        self._emit(": ")

    def _process_comma(self) -> None:
        if self._is_group[-1]:
            self._end_group(is_tuple=True)
        self._pending_comma = ", "

    def _open_bracket(self, char: str) -> None:
        self._is_group.append(char == "(")
        if char == "(":
            self._emit_value("")
            self._groups.append([])
        else:
            self._emit_value(char)

    def _close_bracket(self, char: str) -> None:
        if self._is_group[-1]:
            is_empty = self._expected_syntax == "value or end"
            self._end_group(is_tuple=is_empty)
            if is_empty:
                self._emit("]")
        else:
            self._emit("}" if char == "}" else "]")
        self._is_group.pop()
        self._pending_comma = ""

    def _end_group(self, *, is_tuple: bool) -> None:
        """Write the text since the last open parenthesis, as an array for a tuple, else as a single value."""
        self._is_group[-1] = False
        group_text = self._groups.pop()
        self._emit(("[" if is_tuple else "") + "".join(group_text))

    def _begin_string(self) -> None:
        self._emit_value('"')

    def _write_in_string(self, text: str) -> None:
        self._emit(json.dumps(text, ensure_ascii=False)[1:-1])

    def _begin_escape(self) -> None:
        pass

    def _scan_escape(self, text: str, position: int) -> int:
        char = text[position]
        if self._inside == "hex":
            if char not in HEX_DIGITS:
                self.is_invalid = True
                return position
            self._digits += char
            if len(self._digits) == self._hex_length:
                self._write_character(int(self._digits, 16))
        elif char in _OCTAL and (self._inside == "escape" or len(self._digits) < 3):
            self._inside, self._digits = "octal", (self._digits if self._inside == "octal" else "") + char
        elif self._inside == "octal":
            self._write_character(int(self._digits, 8))
            return position
        elif char in _HEX_LENGTHS:
            self._inside, self._digits, self._hex_length = "hex", "", _HEX_LENGTHS[char]
        else:
            # Python keeps the backslash of an unknown escape.
            self._write_in_string(char if char in "'\"\\" else _ESCAPES.get(char, f"\\{char}"))
            self._inside = "string"
        return position + 1

    def _write_character(self, code_point: int) -> None:
        self._inside = "string"
        if code_point > 0x10FFFF:
            self.is_invalid = True
        elif 0xD800 <= code_point <= 0xDFFF:
            # One half of a surrogate pair. A JSON decoder joins the escapes of both halves.
            self._emit(f"\\u{code_point:04x}")
        else:
            self._write_in_string(chr(code_point))

    def _begin_word(self, char: str) -> bool:
        if _WORD_RUN.match(char) is None:
            return False
        self._inside, self._word_parts = "word", []
        return True

    def _scan_word(self, text: str, position: int) -> int:
        run = _WORD_RUN.match(text, position)
        if run is not None:
            self._word_parts.append(run.group())
            return run.end()
        word = _json_word("".join(self._word_parts))
        if word is None:
            self.is_invalid = True
        else:
            self._emit_value(word)
            self._end_value()
        return position


def _json_word(word: str) -> str | None:
    """Return the JSON text of a finite Python number or of one of `_NAMES`.

    The result is None for other words, and for numbers that are too long.
    """
    if word in _NAMES:
        return _NAMES[word]
    if len(word) > MAX_WORD_LENGTH:
        return None
    if NUMBER.fullmatch(word):
        return word
    try:
        number = float(word)  # Python also allows "1_000", ".5" and "+1"
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return str(int(word)) if word.lstrip("+-").replace("_", "").isdigit() else repr(number)
