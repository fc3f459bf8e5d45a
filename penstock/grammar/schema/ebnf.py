"""Functions that write expressions in xgrammar's EBNF notation, and `EbnfRules`, which collects rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.errors import InputError

MAX_RULES = 20_000  # of one grammar
LAST_CHARACTER = 0x10FFFF
EMPTY = '""'  # matches the empty text
_PLAIN_IN_TEXT = " !#$%&()*+,-./:;<=>?@[]_{|}~"  # characters that need no escape in a literal

Ranges = Sequence[tuple[int, int]]  # inclusive ranges of code points, ascending and not adjacent
ALL_CHARACTERS: Ranges = ((0, 0xD7FF), (0xE000, LAST_CHARACTER))  # all code points that UTF-8 can encode


class EbnfRules:
    """The rules of a grammar. Equal bodies share one rule, except those of reserved names.

    The name of a rule begins with the purpose for which it was added first.
    """

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._bodies

    def add(self, purpose: str, body: str) -> str:
        """Return the name of a rule with this body.

        Raises:
            InputError: see `reserve`.
        """
        name = self._names.get(body)
        if name is None:
            name = self.reserve(purpose)
            self._names[body] = name
            self._bodies[name] = body
        return name

    def reserve(self, purpose: str) -> str:
        """Reserve and return a new rule name, so that rules can refer to it. `define` sets the body later.

        Raises:
            InputError: the grammar has `MAX_RULES` rules already.
        """
        if len(self._bodies) >= MAX_RULES:
            raise InputError(f"the grammar needs more than {MAX_RULES} rules: make it smaller or flatter")
        name = f"{purpose}_{len(self._bodies)}"
        self._bodies[name] = EMPTY
        return name

    def define(self, name: str, body: str) -> None:
        """Set the body of a reserved name."""
        self._bodies[name] = body

    def text(self, root: str) -> str:
        """Return the text of the grammar. ``root`` is the expression that the whole output must match."""
        lines = [f"{name} ::= {body}" for name, body in self._bodies.items()]
        return "\n".join([f"root ::= {root}", *lines, ""])


def literal(text: str) -> str:
    """Return a literal, with escapes as needed.

    Raises:
        InputError: the text contains a lone surrogate.
    """
    return '"' + "".join(map(_escaped_character, text)) + '"' if text else EMPTY


def char_class(ranges: Ranges) -> str:
    """Return a character class of at least one character."""
    assert ranges, "a class without characters matches nothing"
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return literal(chr(ranges[0][0]))
    parts = (
        _class_character(low) if low == high else f"{_class_character(low)}-{_class_character(high)}"
        for low, high in ranges
    )
    return f"[{''.join(parts)}]"


def sequence(*parts: str) -> str:
    """Return a sequence of expressions, without the empty ones."""
    return " ".join(part for part in parts if part != EMPTY) or EMPTY


def choice(alternatives: Iterable[str]) -> str:
    """Return a choice of at least one alternative. Duplicates are removed."""
    distinct_alternatives = list(dict.fromkeys(alternatives))
    assert distinct_alternatives, "a choice without alternatives"
    return (
        distinct_alternatives[0]
        if len(distinct_alternatives) == 1
        else f"({' | '.join(distinct_alternatives)})"
    )


def repeated(part: str, min_count: int, max_count: int | None) -> str:
    """Return a repetition. ``max_count`` None means unbounded."""
    if max_count == 0 or part == EMPTY:
        return EMPTY
    if (min_count, max_count) == (1, 1):
        return part
    quantifier = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((min_count, max_count))
    if quantifier is None and min_count == max_count:
        quantifier = f"{{{min_count}}}"
    elif quantifier is None:
        quantifier = f"{{{min_count},{'' if max_count is None else max_count}}}"
    return f"({part}){quantifier}"


def without(ranges: Ranges, excluded: Ranges) -> list[tuple[int, int]]:
    """Return the ranges of the characters in ``ranges`` that are not in ``excluded``."""
    result = list(ranges)
    for low, high in excluded:
        result = [
            part
            for first, last in result
            for part in ((first, min(last, low - 1)), (max(first, high + 1), last))
            if part[0] <= part[1]
        ]
    return sorted(set(result))


def union(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union of ranges as ascending ranges that neither overlap nor adjoin."""
    result: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if result and low <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return result


def _escaped_character(character: str) -> str:
    is_plain = character.isascii() and (character.isalnum() or character in _PLAIN_IN_TEXT)
    return character if is_plain else _escape(ord(character))


def _class_character(code_point: int) -> str:
    return chr(code_point) if code_point < 128 and chr(code_point).isalnum() else _escape(code_point)


def _escape(code_point: int) -> str:
    if 0xD800 <= code_point <= 0xDFFF:
        raise InputError(f"the grammar has a lone surrogate, U+{code_point:04X}, which UTF-8 cannot encode")
    return f"\\u{code_point:04x}" if code_point < 0x10000 else f"\\U{code_point:08x}"
