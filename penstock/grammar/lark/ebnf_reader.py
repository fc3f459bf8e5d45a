"""Reads EBNF: rules ``name ::= expression``, in the notation of GBNF and xgrammar.

An expression consists of strings ("..."), character classes ([a-z], [^a-z]), any character (.), references,
groups, ``|`` and the repetitions ``*``, ``+``, ``?``, ``{n}``, ``{m,n}`` and ``{m,}``. Comments begin with #.
"""

from __future__ import annotations

import re
from typing import NoReturn

from penstock.errors import InputError, UnsupportedFeatureError
from penstock.grammar.lark.nodes import (
    ANY_CHARACTER,
    EMPTY,
    Chars,
    Node,
    Ref,
    Rules,
    Text,
    choice,
    repeated,
    sequence,
)
from penstock.grammar.schema.ebnf import ALL_CHARACTERS, union, without

_MAX_DEPTH = 100  # maximum nesting of groups
_MAX_REPEAT = 100_000  # maximum m and n of {n} and {m,n}
_SPACE_AND_COMMENTS = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_RULE_START = re.compile(r"([A-Za-z_][A-Za-z0-9_.\-]*)(?:[ \t\r\n]|#[^\n]*)*::=")
_STRING_LITERAL = re.compile(r'"((?:[^"\\\r\n]|\\[^\r\n])*)"')
_CHARACTER_CLASS = re.compile(r"\[(\^?)((?:[^\]\\\r\n]|\\[^\r\n])*)\]")
_REPETITION_BOUNDS = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_CHARACTER_OR_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL
)
_ESCAPES = {
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "f": "\f",
    "v": "\v",
    "b": "\b",
    "a": "\a",
    "0": "\0",
    "e": "\x1b",
}


def read_ebnf(text: str) -> Rules:
    """Return the rules of a grammar, including ``root``.

    Raises:
        InputError: the text is not valid EBNF, or its groups are nested too deeply.
        UnsupportedFeatureError: the text uses an unsupported construct.
    """
    return _Reader(text).rules()


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def rules(self) -> Rules:
        rules: Rules = {}
        first_uses: dict[str, int] = {}
        self._skip_space()
        while self._position < len(self._text):
            rule_start = _RULE_START.match(self._text, self._position)
            if rule_start is None:
                self._fail("expected a rule, name ::= expression")
            name = rule_start[1]
            if name in rules:
                self._fail(f"the rule {name!r} is defined twice")
            self._position = rule_start.end()
            rules[name] = self._alternatives(0, first_uses)
        if "root" not in rules:
            self._fail("there is no rule named root")
        for name, position in first_uses.items():
            if name not in rules:
                self._position = position
                self._fail(f"the rule {name!r} is not defined")
        return rules

    def _alternatives(self, depth: int, first_uses: dict[str, int]) -> Node:
        if depth > _MAX_DEPTH:
            raise InputError(f"the ebnf grammar has groups more than {_MAX_DEPTH} deep: make it flatter")
        options = [self._sequence(depth, first_uses)]
        while self._skip_character("|"):
            options.append(self._sequence(depth, first_uses))
        return choice(options)

    def _sequence(self, depth: int, first_uses: dict[str, int]) -> Node:
        parts: list[Node] = []
        while True:
            self._skip_space()
            if self._position >= len(self._text) or self._text[self._position] in "|)":
                return sequence(parts)
            if _RULE_START.match(self._text, self._position):
                if depth:
                    self._fail("a group is not closed")
                return sequence(parts)
            parts.append(self._repetition(self._atom(depth, first_uses)))

    def _repetition(self, part: Node) -> Node:
        while True:
            self._skip_space()
            char = self._text[self._position : self._position + 1]
            if char in ("*", "+", "?") and char:
                self._position += 1
                part = repeated(part, int(char == "+"), 1 if char == "?" else None)
            elif char == "{":
                bounds = _REPETITION_BOUNDS.match(self._text, self._position)
                if bounds is None:
                    self._fail("{ begins no repetition: write {n}, {m,n} or {m,}")
                min_count = int(bounds[1])
                max_count = min_count if bounds[2] is None else int(bounds[3]) if bounds[3] else None
                if max(min_count, max_count or 0) > _MAX_REPEAT:
                    self._fail(f"a repetition of more than {_MAX_REPEAT} times")
                if max_count is not None and max_count < min_count:
                    self._fail("a repetition whose bounds are out of order")
                self._position = bounds.end()
                part = repeated(part, min_count, max_count)
            else:
                return part

    def _atom(self, depth: int, first_uses: dict[str, int]) -> Node:
        char = self._text[self._position]
        if char == '"':
            text = self._match(_STRING_LITERAL, "an unterminated string")[1]
            code_points = [code_point for code_point, _ in self._chars(text)]
            if any(0xD800 <= code_point <= 0xDFFF for code_point in code_points):
                self._fail("a surrogate code point, which UTF-8 cannot encode,")
            return Text("".join(map(chr, code_points))) if code_points else EMPTY
        if char == "[":
            return self._class()
        if char == ".":
            self._position += 1
            return Chars(ANY_CHARACTER)
        if char == "(":
            if self._text[self._position + 1 : self._position + 2] == "=":
                raise UnsupportedFeatureError("a lookahead (= ...) in an ebnf grammar", "omit it")
            self._position += 1
            group = self._alternatives(depth + 1, first_uses)
            if not self._skip_character(")"):
                self._fail("a group is not closed")
            return group
        name = _NAME.match(self._text, self._position)
        if name is None:
            self._fail(f"unexpected {char!r}")
        if self._text[name.end() : name.end() + 1] == "(" and name[0] in _UNSUPPORTED_MACROS:
            raise UnsupportedFeatureError(f"{name[0]}(...) in an ebnf grammar", "use a structural tag")
        first_uses.setdefault(name[0], self._position)
        self._position = name.end()
        return Ref(name[0])

    def _class(self) -> Node:
        match = self._match(_CHARACTER_CLASS, "an unterminated class of characters")
        chars = self._chars(match[2])
        ranges: list[tuple[int, int]] = []
        index = 0
        while index < len(chars):
            low = chars[index][0]
            if index + 2 < len(chars) and chars[index + 1] == (ord("-"), False):
                high = chars[index + 2][0]
                if low > high:
                    self._fail("a range of characters that is out of order")
                ranges.append((low, high))
                index += 3
            else:
                ranges.append((low, low))
                index += 1
        ranges_union = union(ranges)
        characters = without(ALL_CHARACTERS, ranges_union) if match[1] else _without_surrogates(ranges_union)
        if not characters:
            self._fail("a class without characters")
        if len(characters) == 1 and characters[0][0] == characters[0][1]:
            return Text(chr(characters[0][0]))
        return Chars(tuple(characters))

    def _chars(self, text: str) -> list[tuple[int, bool]]:
        """Return (code point, whether it was written as an escape) of each character of a string or class."""
        result = []
        for match in _CHARACTER_OR_ESCAPE.finditer(text):
            if match[6] is not None:
                result.append((ord(match[6]), False))
                continue
            digits = match[1] or match[2] or match[3] or match[4]
            if digits is not None:
                code_point = int(digits, 16)
                if code_point > 0x10FFFF:
                    self._fail(f"\\U{digits}, which is not a character")
            else:
                letter = match[5]
                if letter.isalnum() and letter not in _ESCAPES:
                    self._fail(f"\\{letter}, which is not an escape")
                code_point = ord(_ESCAPES.get(letter, letter))
            result.append((code_point, True))
        return result

    def _match(self, pattern: re.Pattern[str], problem: str) -> re.Match[str]:
        match = pattern.match(self._text, self._position)
        if match is None:
            self._fail(problem)
        self._position = match.end()
        return match

    def _skip_space(self) -> None:
        match = _SPACE_AND_COMMENTS.match(self._text, self._position)
        assert match is not None
        self._position = match.end()

    def _skip_character(self, char: str) -> bool:
        self._skip_space()
        if not self._text.startswith(char, self._position):
            return False
        self._position += 1
        return True

    def _fail(self, problem: str) -> NoReturn:
        line = self._text.count("\n", 0, self._position) + 1
        column = self._position - (self._text.rfind("\n", 0, self._position) + 1) + 1
        raise InputError(f"the ebnf grammar is not valid: {problem} at line {line}, column {column}")


_UNSUPPORTED_MACROS = {
    "TagDispatch",
    "TokenTagDispatch",
    "Token",
    "ExcludeToken",
    "Repeat",
    "Regex",
    "AnyTokens",
}


def _without_surrogates(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return without(ranges, [(0xD800, 0xDFFF)])
