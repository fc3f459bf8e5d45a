"""Regular expressions as trees: their lengths, their EBNF, and the texts that match."""

from __future__ import annotations

from collections.abc import Callable

from penstock.grammar.schema.ebnf import NOTHING, Ranges, char_class, choice, repeated, sequence
from penstock.grammar.schema.regex_parser import parse_pattern, parse_regex
from penstock.grammar.schema.regex_tree import Alt, Anchor, Char, Node, Repeat, Seq

__all__ = [
    "Alt",
    "Anchor",
    "Char",
    "Node",
    "Repeat",
    "Seq",
    "lengths",
    "matches",
    "parse_pattern",
    "parse_regex",
    "to_ebnf",
    "to_plain_ebnf",
]


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


def to_ebnf(
    node: Node,
    write: Callable[[Ranges, int, int | None], str],
    share: Callable[[str], str] = lambda body: body,
) -> str:
    """The tree in EBNF.

    Args:
        node: the tree.
        write: writes characters of given ranges, so many at least and at most (None: without an end).
        share: gives a part of the result in another form, such as the name of a rule.
    """
    if isinstance(node, Char):
        return write(node.ranges, 1, 1)
    if isinstance(node, Repeat):
        if isinstance(node.part, Char) and node.most != 0:
            return write(node.part.ranges, node.least, node.most)
        return repeated(to_ebnf(node.part, write, share), node.least, node.most)
    if isinstance(node, Seq):
        return sequence(*(to_ebnf(part, write, share) for part in node.parts)) if node.parts else NOTHING
    assert isinstance(node, Alt)
    return share(choice(to_ebnf(option, write, share) for option in node.options))


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
