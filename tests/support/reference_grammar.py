"""A slow and simple recogniser of grammars, the reference for the texts that their rules match."""

from __future__ import annotations

from penstock.grammar.lark.nodes import Alt, Chars, Node, Ref, Repeat, Rules, Seq, Text

Ends = dict[tuple[str, int], frozenset[int]]


def matches(rules: Rules, text: str) -> bool:
    """Return whether the rule ``root`` matches the whole text."""
    known: Ends = {(name, at): frozenset() for name in rules for at in range(len(text) + 1)}
    while True:  # recursion: until no rule matches more than before
        found = {(name, at): _ends(rules[name], text, at, known) for name, at in known}
        if found == known:
            return len(text) in known["root", 0]
        known = found


def _ends(node: Node, text: str, at: int, known: Ends) -> frozenset[int]:
    """Return the possible ends of a match that begins at ``at``."""
    if isinstance(node, Ref):
        return known[node.name, at]
    if isinstance(node, Text):
        return frozenset({at + len(node.text)} if text.startswith(node.text, at) else ())
    if isinstance(node, Chars):
        is_in = at < len(text) and any(low <= ord(text[at]) <= high for low, high in node.ranges)
        return frozenset({at + 1} if is_in else ())
    if isinstance(node, Alt):
        return frozenset().union(*(_ends(option, text, at, known) for option in node.options))
    if isinstance(node, Seq):
        ends = frozenset({at})
        for part in node.parts:
            ends = _all(part, text, ends, known)
        return ends
    assert isinstance(node, Repeat)
    ends = frozenset({at})
    for _ in range(node.min_count):
        ends = _all(node.part, text, ends, known)
    rounds = len(text) + 1 if node.max_count is None else node.max_count - node.min_count
    for _ in range(rounds):
        ends |= _all(node.part, text, ends, known)
    return ends


def _all(node: Node, text: str, starts: frozenset[int], known: Ends) -> frozenset[int]:
    return frozenset().union(*(_ends(node, text, start, known) for start in starts))
