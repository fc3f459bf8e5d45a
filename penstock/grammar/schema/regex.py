"""Operations on regular expression trees: lengths, conversion to EBNF, matching."""

from __future__ import annotations

from collections.abc import Callable

from penstock.grammar.schema.ebnf import EMPTY, Ranges, char_class, choice, repeated, sequence
from penstock.grammar.schema.regex_parser import parse_pattern, parse_regex
from penstock.grammar.schema.regex_tree import Anchor, Char, RegexAlt, RegexNode, RegexRepeat, RegexSeq

__all__ = [
    "Anchor",
    "Char",
    "RegexAlt",
    "RegexNode",
    "RegexRepeat",
    "RegexSeq",
    "lengths",
    "matches",
    "parse_pattern",
    "parse_regex",
    "to_ebnf",
    "to_plain_ebnf",
]


def lengths(node: RegexNode) -> tuple[int, int | None]:
    """Return (minimum, maximum length of matching texts); the maximum is None if unbounded."""
    if isinstance(node, Char):
        return 1, 1
    if isinstance(node, RegexRepeat):
        min_length, max_length = lengths(node.part)
        is_unbounded = max_length is None or (node.max_count is None and max_length > 0)
        return min_length * node.min_count, None if is_unbounded else (max_length or 0) * (
            node.max_count or 0
        )
    if isinstance(node, RegexSeq):
        pairs = [lengths(part) for part in node.parts]
        return sum(low for low, _ in pairs), _sum_or_none([high for _, high in pairs])
    assert isinstance(node, RegexAlt)
    pairs = [lengths(option) for option in node.options]
    max_lengths = [high for _, high in pairs]
    return min(low for low, _ in pairs), None if None in max_lengths else max(
        high or 0 for high in max_lengths
    )


def to_ebnf(
    node: RegexNode,
    write: Callable[[Ranges, int, int | None], str],
    share: Callable[[str], str] = lambda body: body,
) -> str:
    """Convert the tree to EBNF.

    Args:
        node: the tree.
        write: returns the expression of characters, given (ranges, minimum count, maximum count or None).
        share: returns a replacement of the expression of an alternation, such as the name of a new rule.
    """
    if isinstance(node, Char):
        return write(node.ranges, 1, 1)
    if isinstance(node, RegexRepeat):
        if isinstance(node.part, Char) and node.max_count != 0:
            return write(node.part.ranges, node.min_count, node.max_count)
        return repeated(to_ebnf(node.part, write, share), node.min_count, node.max_count)
    if isinstance(node, RegexSeq):
        return sequence(*(to_ebnf(part, write, share) for part in node.parts)) if node.parts else EMPTY
    assert isinstance(node, RegexAlt)
    return share(choice(to_ebnf(option, write, share) for option in node.options))


def to_plain_ebnf(node: RegexNode) -> str:
    """Convert the tree to EBNF for plain text, without the escape sequences of JSON strings."""
    return to_ebnf(
        node, lambda ranges, min_count, max_count: repeated(char_class(ranges), min_count, max_count)
    )


def matches(node: RegexNode, text: str) -> bool:
    """Return whether the whole text matches.

    The function runs in polynomial time. Python's ``re`` can take exponential time.
    """
    return len(text) in _end_positions(node, text, frozenset({0}))


def _end_positions(node: RegexNode, text: str, starts: frozenset[int]) -> frozenset[int]:
    """Return the positions at which matches that begin at one of ``starts`` can end."""
    if isinstance(node, Char):
        positions = (i for i in starts if i < len(text))
        return frozenset(
            i + 1 for i in positions if any(low <= ord(text[i]) <= high for low, high in node.ranges)
        )
    if isinstance(node, RegexSeq):
        for part in node.parts:
            starts = _end_positions(part, text, starts)
        return starts
    if isinstance(node, RegexAlt):
        return frozenset().union(*(_end_positions(option, text, starts) for option in node.options))
    assert isinstance(node, RegexRepeat)
    for _ in range(node.min_count):
        previous, starts = starts, _end_positions(node.part, text, starts)
        if starts == previous:
            break
    ends = new_ends = starts
    max_rounds = len(text) + 1 if node.max_count is None else node.max_count - node.min_count
    for _ in range(min(max_rounds, len(text) + 1)):
        new_ends = _end_positions(node.part, text, new_ends) - ends
        if not new_ends:
            break
        ends |= new_ends
    return ends


def _sum_or_none(values: list[int | None]) -> int | None:
    return None if None in values else sum(value or 0 for value in values)
