"""Regular expressions -> EBNF: the part of ECMA 262 that describes a regular language, and nothing looser.

Classes keep to what ECMA 262 and Python agree on: ``\\d`` and ``\\w`` are ASCII; ``\\D``, ``\\W`` and ``\\S``
leave out the characters that one of the two would not count among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.errors import InputError
from penstock.pipelines.grammars.ebnf import (
    ALL_CHARACTERS,
    NOTHING,
    Ranges,
    char_class,
    choice,
    repeated,
    sequence,
    union,
    without,
)

_MAX_DEPTH = 40
_MAX_REPEAT = 100_000
_DIGITS = [(48, 57)]
_WORD = [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACE = [
    *[(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)],
    *[(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)],
]
_SPACE_OF_BOTH = [part for part in _SPACE if part != (0xFEFF, 0xFEFF)]
_LINE_ENDS = [(10, 10), (13, 13), (0x2028, 0x2029)]
_ASCII = [(0, 127)]
_ALSO_SPACE_IN_PYTHON = [(0x1C, 0x1F), (0x85, 0x85)]
_ANY = without(ALL_CHARACTERS, _LINE_ENDS)
_CLASSES = {
    "d": _DIGITS,
    "D": without(_ASCII, _DIGITS),
    "w": _WORD,
    "W": without(_ASCII, _WORD),
    "s": _SPACE_OF_BOTH,
    "S": without(ALL_CHARACTERS, [*_SPACE, *_ALSO_SPACE_IN_PYTHON]),
}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}


@dataclass(frozen=True, slots=True)
class Char:
    """One character of these ranges."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Seq:
    """Parts one behind the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of several."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part ``least`` to ``most`` times, None without an end."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """``^`` or ``$``."""

    sign: str


Node: TypeAlias = Char | Seq | Alt | Repeat | Anchor
_ANYTHING = Repeat(Char(tuple(map(tuple, ALL_CHARACTERS))), 0, None)  # type: ignore[arg-type]


def parse_regex(pattern: str, *, search: bool) -> Node:
    """The texts that match, as a tree without anchors.

    Args:
        pattern: the expression.
        search: whether a match anywhere in the text is enough, as for a schema's ``pattern``; otherwise the
            whole text must match.

    Raises:
        InputError: it is not valid, or uses what no grammar can be made of (the message names it).
    """
    parser = _Parser(pattern)
    if any("\ud800" <= sign <= "\udfff" for sign in pattern):
        raise parser.error("a surrogate, which no text can have,")
    tree = parser.alternatives(0)
    if parser.rest:
        raise parser.error("an unmatched )")
    options = tree.options if isinstance(tree, Alt) else (tree,)
    result = tuple(_whole(option, search, pattern) for option in options)
    return result[0] if len(result) == 1 else Alt(result)


def lengths(node: Node) -> tuple[int, int | None]:
    """The fewest and the most characters of a text that matches; None without an end."""
    if isinstance(node, Char):
        return 1, 1
    if isinstance(node, Repeat):
        least, most = lengths(node.part)
        no_end = most is None or (node.most is None and most > 0)
        return least * node.least, None if no_end else (most or 0) * (node.most or 0)
    if isinstance(node, Seq):
        pairs = [lengths(part) for part in node.parts]
        return sum(low for low, _ in pairs), _sum([high for _, high in pairs])
    assert isinstance(node, Alt)
    pairs = [lengths(option) for option in node.options]
    highs = [high for _, high in pairs]
    return min(low for low, _ in pairs), None if None in highs else max(high or 0 for high in highs)


def to_ebnf(node: Node, write: Callable[[Ranges, int, int | None], str]) -> str:
    """The tree in EBNF.

    Args:
        node: the tree.
        write: writes characters of given ranges, so many at least and at most (None: without an end).
    """
    if isinstance(node, Char):
        return write(node.ranges, 1, 1)
    if isinstance(node, Repeat):
        if isinstance(node.part, Char) and node.most != 0:
            return write(node.part.ranges, node.least, node.most)
        return repeated(to_ebnf(node.part, write), node.least, node.most)
    if isinstance(node, Seq):
        return sequence(*(to_ebnf(part, write) for part in node.parts)) if node.parts else NOTHING
    assert isinstance(node, Alt)
    return choice(to_ebnf(option, write) for option in node.options)


def to_plain_ebnf(node: Node) -> str:
    """The tree in EBNF, its characters as they are."""
    return to_ebnf(node, lambda ranges, least, most: repeated(char_class(ranges), least, most))


def matches(node: Node, text: str) -> bool:
    """Whether the whole text matches. Takes no more than polynomial time, as Python's ``re`` may."""
    return len(text) in _ends(node, text, frozenset({0}))


def _ends(node: Node, text: str, starts: frozenset[int]) -> frozenset[int]:
    """Where a match may end that begins at one of ``starts``."""
    if isinstance(node, Char):
        inside = (i for i in starts if i < len(text))
        return frozenset(i + 1 for i in inside if any(a <= ord(text[i]) <= b for a, b in node.ranges))
    if isinstance(node, Seq):
        for part in node.parts:
            starts = _ends(part, text, starts)
        return starts
    if isinstance(node, Alt):
        return frozenset().union(*(_ends(option, text, starts) for option in node.options))
    assert isinstance(node, Repeat)
    for _ in range(node.least):
        before, starts = starts, _ends(node.part, text, starts)
        if starts == before:
            break
    found = newest = starts
    rounds = len(text) + 1 if node.most is None else node.most - node.least
    for _ in range(min(rounds, len(text) + 1)):
        newest = _ends(node.part, text, newest) - found
        if not newest:
            break
        found |= newest
    return found


def _sum(values: list[int | None]) -> int | None:
    return None if None in values else sum(value or 0 for value in values)


def _whole(option: Node, search: bool, pattern: str) -> Node:
    """An alternative of the top level: its anchors taken off, and made to match the whole text."""
    parts = list(option.parts if isinstance(option, Seq) else (option,))
    starts = ends = not search
    while parts and parts[0] == Anchor("^"):
        starts = True
        del parts[0]
    while parts and parts[-1] == Anchor("$"):
        ends = True
        del parts[-1]
    if any(map(_has_anchor, parts)):
        raise InputError(f"the regular expression {pattern!r} has ^ or $ in its middle: they go at its ends")
    if not starts:
        parts.insert(0, _ANYTHING)
    if not ends:
        parts.append(_ANYTHING)
    return Seq(tuple(parts))


def _has_anchor(node: Node) -> bool:
    if isinstance(node, Anchor):
        return True
    if isinstance(node, Repeat):
        return _has_anchor(node.part)
    children = node.parts if isinstance(node, Seq) else node.options if isinstance(node, Alt) else ()
    return any(map(_has_anchor, children))


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    @property
    def rest(self) -> str:
        return self._pattern[self._at :]

    def error(self, what: str) -> InputError:
        shown = self._pattern if len(self._pattern) <= 80 else f"{self._pattern[:80]}..."
        return InputError(f"the regular expression {shown!r} has {what} at position {self._at}")

    def alternatives(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise self.error(f"groups nested more than {_MAX_DEPTH} deep")
        options = [self._sequence(depth)]
        while self._take("|"):
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self._at < len(self._pattern) and self._peek() not in "|)":
            parts.append(self._quantified(self._atom(depth)))
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def _quantified(self, atom: Node) -> Node:
        least, most = 1, 1
        bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._peek())
        if bounds is not None:
            self._at += 1
        elif self._peek() == "{":
            bounds = self._bounds()
        if bounds is None:
            return atom
        if isinstance(atom, Anchor):
            raise self.error("a repeated ^ or $")
        self._take("?")  # lazy or not, the same texts match
        if self._peek() in tuple("*+?{"):
            raise self.error("a repetition of a repetition")
        least, most = bounds  # type: ignore[assignment]
        return Repeat(atom, least, most)

    def _bounds(self) -> tuple[int, int | None]:
        end = self._pattern.find("}", self._at)
        low, comma, high = self._pattern[self._at + 1 : max(end, self._at + 1)].partition(",")
        if end < 0 or not _is_number(low) or not (high == "" or _is_number(high)):
            raise self.error("a { that begins no repetition (write \\{ for the character)")
        least = int(low)
        most = (int(high) if high else None) if comma else least
        if max(least, most or 0) > _MAX_REPEAT:
            raise self.error(f"a repetition of more than {_MAX_REPEAT} times")
        if most is not None and least > most:
            raise self.error("a repetition whose bounds are out of order")
        self._at = end + 1
        return least, most

    def _atom(self, depth: int) -> Node:
        sign = self._next()
        if sign == "(":
            if self._take("?"):
                if not self._take(":"):
                    raise self.error("a group that begins with (?, of which only (?: is supported")
            inner = self.alternatives(depth + 1)
            if not self._take(")"):
                raise self.error("a group without its )")
            return Seq((inner,))
        if sign == "[":
            return self._class()
        if sign == ".":
            return Char(tuple(_ANY))
        if sign in "^$":
            return Anchor(sign)
        if sign in "*+?{":
            self._at -= 1
            raise self.error("nothing to repeat")
        if sign in "]}":
            self._at -= 1
            raise self.error(f"an unmatched {sign} (write \\{sign} for the character)")
        if sign == "\\":
            return Char(tuple(self._escape(in_class=False)))
        return Char(((ord(sign), ord(sign)),))

    def _class(self) -> Node:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        others: list[tuple[int, int]] = []  # what else a negated class must not have
        while not self._take("]"):
            low, wider = self._member()
            if self._peek() == "-" and self.rest[1:2] not in ("]", ""):
                self._at += 1
                high, _ = self._member()
                if not (_is_single(low) and _is_single(high)) or low[0][0] > high[0][0]:
                    raise self.error("a range of characters that is out of order")
                low, wider = [(low[0][0], high[0][0])], []
            ranges += low
            others += wider
        ranges = without(ALL_CHARACTERS, [*ranges, *others]) if negated else union(ranges)
        if not ranges:
            raise self.error("a class without characters")
        return Char(tuple(ranges))

    def _member(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """A member of a class, and the characters that some take it to have besides."""
        sign = self._next()
        if sign != "\\":
            return [(ord(sign), ord(sign))], []
        letter = self._peek()
        found = self._escape(in_class=True)
        wider = {
            "d": without(ALL_CHARACTERS, _ASCII),
            "w": without(ALL_CHARACTERS, _ASCII),
            "D": without(ALL_CHARACTERS, _DIGITS),
            "W": without(ALL_CHARACTERS, _WORD),
            "s": [*_SPACE, *_ALSO_SPACE_IN_PYTHON],
            "S": without(ALL_CHARACTERS, _SPACE_OF_BOTH),
        }
        return found, list(wider.get(letter, []))

    def _escape(self, *, in_class: bool) -> list[tuple[int, int]]:
        letter = self._next()
        if letter in _CLASSES:
            return list(_CLASSES[letter])
        if letter in _CONTROLS:
            point = _CONTROLS[letter]
        elif letter in "xu":
            size = 2 if letter == "x" else 4
            digits = self.rest[:size]
            if len(digits) < size or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
                raise self.error(f"a \\{letter} without its {size} hexadecimal digits")
            self._at += size
            point = int(digits, 16)
        elif letter == "0" and not _is_number(self._peek()):
            point = 0
        elif letter == "b" and in_class:
            point = 8
        elif letter.isalnum():
            raise self.error(f"\\{letter}, which is not supported,")
        else:
            point = ord(letter)
        if 0xD800 <= point <= 0xDFFF:
            raise self.error("a surrogate, which no text can have,")
        return [(point, point)]

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _next(self) -> str:
        if self._at >= len(self._pattern):
            raise self.error("an unexpected end")
        self._at += 1
        return self._pattern[self._at - 1]

    def _take(self, sign: str) -> bool:
        if self._peek() != sign:
            return False
        self._at += 1
        return True


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _is_single(ranges: list[tuple[int, int]]) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
