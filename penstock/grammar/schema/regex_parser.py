"""Parses regular expressions: the constructs of ECMA 262 that describe regular languages.

Character classes contain only the characters that the class has in both dialects: ECMA 262 and Python. For
example, ``\\d`` is ``[0-9]``, because ECMA 262 has no other digits. ``\\D`` contains only ASCII characters,
because Python's class excludes the digits of all scripts. In negated lookaheads, a class contains the
characters that it has in either dialect.
"""

from __future__ import annotations

from penstock.errors import InputError
from penstock.grammar.schema.ebnf import ALL_CHARACTERS, Ranges, union, without
from penstock.grammar.schema.regex_tree import Anchor, Char, RegexAlt, RegexNode, RegexRepeat, RegexSeq

_MAX_DEPTH = 40  # maximum nesting of groups
_MAX_REPEAT = 100_000  # maximum bound of a repetition
_DIGITS = [(48, 57)]
_WORD = [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACE = [
    *[(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)],
    *[(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)],
]
_SPACE_IN_BOTH_DIALECTS = [part for part in _SPACE if part != (0xFEFF, 0xFEFF)]
_LINE_ENDS = [(10, 10), (13, 13), (0x2028, 0x2029)]
_ASCII = [(0, 127)]
_SPACE_ONLY_IN_PYTHON = [(0x1C, 0x1F), (0x85, 0x85)]
_ANY_IN_EITHER_DIALECT = without(ALL_CHARACTERS, [(10, 10)])
_ANY = without(ALL_CHARACTERS, _LINE_ENDS)
_CLASSES = {
    "d": _DIGITS,
    "D": without(_ASCII, _DIGITS),
    "w": _WORD,
    "W": without(_ASCII, _WORD),
    "s": _SPACE_IN_BOTH_DIALECTS,
    "S": without(ALL_CHARACTERS, [*_SPACE, *_SPACE_ONLY_IN_PYTHON]),
}
# Letter of a class -> a superset of the characters that the class has in only one dialect.
_EITHER_DIALECT: dict[str, Ranges] = {
    "d": without(ALL_CHARACTERS, _ASCII),
    "w": without(ALL_CHARACTERS, _ASCII),
    "D": without(ALL_CHARACTERS, _DIGITS),
    "W": without(ALL_CHARACTERS, _WORD),
    "s": [*_SPACE, *_SPACE_ONLY_IN_PYTHON],
    "S": without(ALL_CHARACTERS, _SPACE_IN_BOTH_DIALECTS),
}
_CONTROL_ESCAPES = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}


_ANY_TEXT = RegexRepeat(Char(tuple(map(tuple, ALL_CHARACTERS))), 0, None)  # type: ignore[arg-type]


def parse_regex(pattern: str, *, search: bool) -> RegexNode:
    """Parse a regular expression to a tree without anchors.

    Args:
        pattern: the expression.
        search: whether a match anywhere in the text is sufficient, as for a schema's ``pattern``. Otherwise
            the whole text must match.

    Raises:
        InputError: the expression is invalid or has an unsupported construct, which the message names.
    """
    parser = _Parser(pattern)
    tree = parser.alternatives(0)
    if parser.remaining_pattern:
        raise parser.error("an unmatched )")
    return _without_end_anchors(tree, pattern, starts_at_start=not search, ends_at_end=not search)


def parse_pattern(pattern: str) -> tuple[RegexNode, list[tuple[RegexNode, bool]]]:
    """Parse a schema's ``pattern``. Return (tree without lookaheads, [(lookahead, is negated), ...]).

    Lookaheads are supported only directly after a ^ at the start of the pattern. A lookahead is a tree that
    the whole text must match. If the lookahead is negated, the text must not match.

    Raises:
        InputError: see `parse_regex`.
    """
    parser = _Parser(pattern)
    lookaheads: list[tuple[RegexNode, bool]] = []
    if pattern.startswith("^"):
        parser.skip(1)
        while parser.remaining_pattern.startswith(("(?=", "(?!")):
            is_negated = parser.remaining_pattern[2] == "!"
            parser.skip(3)
            group = parser.lookahead(uses_union=is_negated)
            tree = _without_end_anchors(
                group, pattern, starts_at_start=True, ends_at_end=False, uses_union=is_negated
            )
            lookaheads.append((tree, is_negated))
    if not lookaheads:
        return parse_regex(pattern, search=True), []
    tree = parser.alternatives(0)
    if parser.remaining_pattern:
        raise parser.error("an unmatched )")
    if isinstance(tree, RegexAlt):
        raise parser.error("a lookahead beside | (write the alternatives as a group)")
    return _without_end_anchors(tree, pattern, starts_at_start=True, ends_at_end=False), lookaheads


def _without_end_anchors(
    tree: RegexNode, pattern: str, *, starts_at_start: bool, ends_at_end: bool, uses_union: bool = False
) -> RegexNode:
    """Remove the anchors of each top-level alternative.

    Args:
        tree: the expression.
        pattern: the text of the expression, for error messages.
        starts_at_start: whether a match must begin at the start of the text even without ``^``.
        ends_at_end: whether a match must end at the end of the text even without ``$``.
        uses_union: see `_Parser`.
    """
    options = tree.options if isinstance(tree, RegexAlt) else (tree,)
    result = tuple(
        _without_anchors(option, starts_at_start, ends_at_end, pattern, uses_union) for option in options
    )
    return result[0] if len(result) == 1 else RegexAlt(result)


def _without_anchors(
    option: RegexNode, starts_at_start: bool, ends_at_end: bool, pattern: str, uses_union: bool
) -> RegexNode:
    """Remove the anchors of a top-level alternative.

    Add "any text" at the start unless the alternative begins with an anchor or ``starts_at_start`` is set.
    Add "any text" at the end unless the alternative ends with an anchor or ``ends_at_end`` is set.

    Raises:
        InputError: an anchor is not at an end of the alternative.
    """
    parts = list(option.parts if isinstance(option, RegexSeq) else (option,))
    while parts and parts[0] == Anchor("^"):
        starts_at_start = True
        del parts[0]
    while parts and parts[-1] == Anchor("$"):
        ends_at_end = True
        del parts[-1]
        if uses_union:  # Python's $ also matches before a line feed at the end
            parts.append(RegexRepeat(Char(((10, 10),)), 0, 1))
            break
    if any(map(_has_anchor, parts)):
        raise InputError(f"the regular expression {pattern!r} has ^ or $ in its middle: they go at its ends")
    if not starts_at_start:
        parts.insert(0, _ANY_TEXT)
    if not ends_at_end:
        parts.append(_ANY_TEXT)
    return RegexSeq(tuple(parts))


def _has_anchor(node: RegexNode) -> bool:
    if isinstance(node, Anchor):
        return True
    if isinstance(node, RegexRepeat):
        return _has_anchor(node.part)
    children = (
        node.parts if isinstance(node, RegexSeq) else node.options if isinstance(node, RegexAlt) else ()
    )
    return any(map(_has_anchor, children))


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._position = 0
        # Whether a class is the union of its meanings in Python and ECMA 262 instead of the intersection. The
        # union is for negated lookaheads, which must exclude the texts of both dialects.
        self._uses_union = False
        if any("\ud800" <= char <= "\udfff" for char in pattern):
            raise self.error("a surrogate code point, which UTF-8 cannot encode,")

    @property
    def remaining_pattern(self) -> str:
        return self._pattern[self._position :]

    def error(self, problem: str) -> InputError:
        pattern_start = self._pattern if len(self._pattern) <= 80 else f"{self._pattern[:80]}..."
        return InputError(
            f"the regular expression {pattern_start!r} has {problem} at position {self._position}"
        )

    def skip(self, count: int) -> None:
        """Skip characters."""
        self._position += count

    def lookahead(self, *, uses_union: bool) -> RegexNode:
        """Parse the content and the closing parenthesis of a lookahead."""
        self._uses_union = uses_union
        group = self.alternatives(1)
        self._uses_union = False
        if not self._skip_character(")"):
            raise self.error("a group without its )")
        return group

    def alternatives(self, depth: int) -> RegexNode:
        if depth > _MAX_DEPTH:
            raise self.error(f"groups nested more than {_MAX_DEPTH} deep")
        options = [self._sequence(depth)]
        while self._skip_character("|"):
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else RegexAlt(tuple(options))

    def _sequence(self, depth: int) -> RegexNode:
        parts: list[RegexNode] = []
        while self._position < len(self._pattern) and self._peek() not in "|)":
            parts.append(self._with_quantifier(self._atom(depth)))
        return parts[0] if len(parts) == 1 else RegexSeq(tuple(parts))

    def _with_quantifier(self, atom: RegexNode) -> RegexNode:
        min_count, max_count = 1, 1
        bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._peek())
        if bounds is not None:
            self._position += 1
        elif self._peek() == "{":
            bounds = self._bounds()
        if bounds is None:
            return atom
        if isinstance(atom, Anchor):
            raise self.error("a repeated ^ or $")
        self._skip_character("?")  # a lazy repetition matches the same texts as a greedy one
        if self._peek() in tuple("*+?{"):
            raise self.error("a repetition of a repetition")
        min_count, max_count = bounds  # type: ignore[assignment]
        return RegexRepeat(atom, min_count, max_count)

    def _bounds(self) -> tuple[int, int | None]:
        end = self._pattern.find("}", self._position)
        low, comma, high = self._pattern[self._position + 1 : max(end, self._position + 1)].partition(",")
        if end < 0 or not _is_number(low) or not (high == "" or _is_number(high)):
            raise self.error("a { that begins no repetition (write \\{ for the character)")
        min_count = int(low)
        max_count = (int(high) if high else None) if comma else min_count
        if max(min_count, max_count or 0) > _MAX_REPEAT:
            raise self.error(f"a repetition of more than {_MAX_REPEAT} times")
        if max_count is not None and min_count > max_count:
            raise self.error("a repetition whose bounds are out of order")
        self._position = end + 1
        return min_count, max_count

    def _atom(self, depth: int) -> RegexNode:
        char = self._next()
        if char == "(":
            if self._skip_character("?"):
                if not self._skip_character(":"):
                    raise self.error("a group that begins with (?: only (?: is supported")
            group = self.alternatives(depth + 1)
            if not self._skip_character(")"):
                raise self.error("a group without its )")
            return RegexSeq((group,))
        if char == "[":
            return self._class()
        if char == ".":
            return Char(tuple(_ANY_IN_EITHER_DIALECT if self._uses_union else _ANY))
        if char in "^$":
            return Anchor(char)
        if char in "*+?{":
            self._position -= 1
            raise self.error("nothing to repeat")
        if char in "]}":
            self._position -= 1
            raise self.error(f"an unmatched {char} (write \\{char} for the character)")
        if char == "\\":
            letter = self._peek()
            characters = self._escape(is_in_class=False)
            return Char(
                tuple(
                    union([*characters, *_EITHER_DIALECT.get(letter, [])]) if self._uses_union else characters
                )
            )
        return Char(((ord(char), ord(char)),))

    def _class(self) -> RegexNode:
        is_complement = self._skip_character("^")
        ranges: list[tuple[int, int]] = []
        # Characters that a member may have in only one dialect.
        either_dialect_ranges: list[tuple[int, int]] = []
        while not self._skip_character("]"):
            member, either_dialect_member = self._member()
            if self._peek() == "-" and self.remaining_pattern[1:2] not in ("]", ""):
                self._position += 1
                last_member, _ = self._member()
                is_range = _is_single(member) and _is_single(last_member)
                if not is_range or member[0][0] > last_member[0][0]:
                    raise self.error("a range of characters that is out of order")
                member, either_dialect_member = [(member[0][0], last_member[0][0])], []
            ranges += member
            either_dialect_ranges += either_dialect_member
        if self._uses_union:
            ranges = (
                without(ALL_CHARACTERS, ranges) if is_complement else union([*ranges, *either_dialect_ranges])
            )
        else:
            ranges = (
                without(ALL_CHARACTERS, [*ranges, *either_dialect_ranges]) if is_complement else union(ranges)
            )
        if not ranges:
            raise self.error("a class without characters")
        return Char(tuple(ranges))

    def _member(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return (characters of a member in both dialects, characters that it may have in only one)."""
        char = self._next()
        if char != "\\":
            return [(ord(char), ord(char))], []
        letter = self._peek()
        characters = self._escape(is_in_class=True)
        return characters, list(_EITHER_DIALECT.get(letter, []))

    def _escape(self, *, is_in_class: bool) -> list[tuple[int, int]]:
        letter = self._next()
        if letter in _CLASSES:
            return list(_CLASSES[letter])
        if letter in _CONTROL_ESCAPES:
            code_point = _CONTROL_ESCAPES[letter]
        elif letter in "xu":
            num_hex_digits = 2 if letter == "x" else 4
            digits = self.remaining_pattern[:num_hex_digits]
            if len(digits) < num_hex_digits or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
                raise self.error(f"a \\{letter} without its {num_hex_digits} hexadecimal digits")
            self._position += num_hex_digits
            code_point = int(digits, 16)
        elif letter == "0" and not _is_number(self._peek()):
            code_point = 0
        elif letter == "b" and is_in_class:
            code_point = 8
        elif letter.isalnum():
            raise self.error(f"\\{letter}, which is not supported,")
        else:
            code_point = ord(letter)
        if 0xD800 <= code_point <= 0xDFFF:
            raise self.error("a surrogate code point, which UTF-8 cannot encode,")
        return [(code_point, code_point)]

    def _peek(self) -> str:
        return self._pattern[self._position : self._position + 1]

    def _next(self) -> str:
        if self._position >= len(self._pattern):
            raise self.error("an unexpected end")
        self._position += 1
        return self._pattern[self._position - 1]

    def _skip_character(self, char: str) -> bool:
        if self._peek() != char:
            return False
        self._position += 1
        return True


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _is_single(ranges: list[tuple[int, int]]) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
