"""A slow and simple recogniser of grammars, the reference for the texts that grammars match."""

from __future__ import annotations

from penstock.grammar.lark.nodes import Alt, Chars, Node, Ref, Repeat, Rules, Seq, Text

Ends = dict[tuple[str, int], frozenset[int]]


def matches(rules: Rules, text: str) -> bool:
    """Return whether the rule ``root`` matches the whole text."""
    known_ends: Ends = {(name, position): frozenset() for name in rules for position in range(len(text) + 1)}
    while True:  # recursive rules: repeat until no rule matches more than before
        extended = {
            (name, position): _ends(rules[name], text, position, known_ends) for name, position in known_ends
        }
        if extended == known_ends:
            return len(text) in known_ends["root", 0]
        known_ends = extended


def _ends(node: Node, text: str, start: int, known: Ends) -> frozenset[int]:
    """Return the possible ends of a match that begins at ``start``."""
    if isinstance(node, Ref):
        return known[node.name, start]
    if isinstance(node, Text):
        return frozenset({start + len(node.text)} if text.startswith(node.text, start) else ())
    if isinstance(node, Chars):
        is_in = start < len(text) and any(low <= ord(text[start]) <= high for low, high in node.ranges)
        return frozenset({start + 1} if is_in else ())
    if isinstance(node, Alt):
        return frozenset().union(*(_ends(option, text, start, known) for option in node.options))
    if isinstance(node, Seq):
        ends = frozenset({start})
        for part in node.parts:
            ends = _ends_from(part, text, ends, known)
        return ends
    assert isinstance(node, Repeat)
    ends = frozenset({start})
    for _ in range(node.min_count):
        ends = _ends_from(node.part, text, ends, known)
    max_repeats = len(text) + 1 if node.max_count is None else node.max_count - node.min_count
    for _ in range(max_repeats):
        ends |= _ends_from(node.part, text, ends, known)
    return ends


def _ends_from(node: Node, text: str, starts: frozenset[int], known: Ends) -> frozenset[int]:
    return frozenset().union(*(_ends(node, text, start, known) for start in starts))
