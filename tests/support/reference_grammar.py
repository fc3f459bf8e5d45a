"""A slow and simple grammar matcher, which is the reference of the tests."""

from __future__ import annotations

from penstock.grammar.lark.nodes import Alt, Chars, Node, Ref, Repeat, Rules, Seq, Text

EndTable = dict[tuple[str, int], frozenset[int]]


def matches(rules: Rules, text: str) -> bool:
    """Return whether the rule ``root`` matches the whole text."""
    known_ends: EndTable = {
        (name, position): frozenset() for name in rules for position in range(len(text) + 1)
    }
    while True:  # rules may be recursive: repeat until the matches do not change
        new_ends = {
            (name, position): _match_ends(rules[name], text, position, known_ends)
            for name, position in known_ends
        }
        if new_ends == known_ends:
            return len(text) in known_ends["root", 0]
        known_ends = new_ends


def _match_ends(node: Node, text: str, start: int, known_ends: EndTable) -> frozenset[int]:
    """Return the end indices of all matches of a node that begin at ``start``."""
    if isinstance(node, Ref):
        return known_ends[node.name, start]
    if isinstance(node, Text):
        return frozenset({start + len(node.text)} if text.startswith(node.text, start) else ())
    if isinstance(node, Chars):
        is_in = start < len(text) and any(low <= ord(text[start]) <= high for low, high in node.ranges)
        return frozenset({start + 1} if is_in else ())
    if isinstance(node, Alt):
        return frozenset().union(*(_match_ends(option, text, start, known_ends) for option in node.options))
    if isinstance(node, Seq):
        ends = frozenset({start})
        for child in node.parts:
            ends = _match_ends_from(child, text, ends, known_ends)
        return ends
    assert isinstance(node, Repeat)
    ends = frozenset({start})
    for _ in range(node.min_count):
        ends = _match_ends_from(node.part, text, ends, known_ends)
    max_repeats = len(text) + 1 if node.max_count is None else node.max_count - node.min_count
    for _ in range(max_repeats):
        ends |= _match_ends_from(node.part, text, ends, known_ends)
    return ends


def _match_ends_from(node: Node, text: str, starts: frozenset[int], known_ends: EndTable) -> frozenset[int]:
    return frozenset().union(*(_match_ends(node, text, start, known_ends) for start in starts))
