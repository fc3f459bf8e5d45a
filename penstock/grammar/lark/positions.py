"""Positions of lexemes in rules: which can follow each other, and which can start at the same position."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.grammar.lark.nodes import Alt, Node, Ref, Repeat, Rules, Seq, children, walk


class LexemePositions:
    """The occurrences of lexemes in rules. Sets of positions are bits of an integer.

    Attributes:
        start: the positions at which a text can start.
        follow_sets: the characters that can follow each lexeme, as bits like ``first_sets``.

    Args:
        rules: rules over lexemes.
        lexemes: all lexemes by name.
        nullable: lexemes that match the empty text.
        first_sets: the characters that each lexeme can start with, as bits.
        root: the name of the start rule.
    """

    def __init__(
        self,
        rules: Rules,
        lexemes: dict[str, Node],
        nullable: set[str],
        first_sets: dict[str, int],
        root: str,
    ) -> None:
        self._lexemes = lexemes
        self._owners: list[str] = []  # the lexeme at each position
        numbered = {name: self._numbered(node) for name, node in rules.items()}
        names = [_name(position) for position in range(len(self._owners))]
        bits = {name: 1 << position for position, name in enumerate(names)}
        empty = {name for name, owner in zip(names, self._owners, strict=True) if owner in nullable}
        follow = _Follow(numbered, empty, bits)
        follow_sets = follow.follow_sets_from(root)
        self.start = follow.first(root)
        self._following = [follow_sets.get(name, 0) for name in names]
        self.follow_sets: dict[str, int] = dict.fromkeys(lexemes, 0)
        for position, owner in enumerate(self._owners):
            for other in _bits(self._following[position]):
                self.follow_sets[owner] |= first_sets[self._owners[other]]

    def lexemes_at(self, group: int) -> frozenset[str]:
        """Return the lexemes at the positions of a group."""
        return frozenset(self._owners[position] for position in _bits(group))

    def next_groups(self, group: int, overlapping: set[frozenset[str]]) -> list[int]:
        """Return groups of positions that can follow a group. The lexemes of a group can start together.

        Args:
            group: the positions.
            overlapping: pairs of lexemes that both match some text, so that both may have ended.
        """
        following: dict[str, int] = {}
        for position in _bits(group):
            owner = self._owners[position]
            following[owner] = following.get(owner, 0) | self._following[position]
        return _merge_overlapping(following, overlapping)

    def _numbered(self, node: Node) -> Node:
        """Return the node with a separate name for each occurrence of a lexeme."""
        if isinstance(node, Ref) and node.name in self._lexemes:
            self._owners.append(node.name)
            return Ref(_name(len(self._owners) - 1))
        if isinstance(node, Seq):
            return Seq(tuple(map(self._numbered, node.parts)))
        if isinstance(node, Alt):
            return Alt(tuple(map(self._numbered, node.options)))
        if isinstance(node, Repeat):
            return Repeat(self._numbered(node.part), node.min_count, node.max_count)
        return node


def _merge_overlapping(masks: dict[str, int], overlapping: set[frozenset[str]]) -> list[int]:
    """Return the masks of the lexemes; the masks of overlapping lexemes are merged."""
    result: list[int] = []
    remaining = dict(masks)
    while remaining:
        name, mask = remaining.popitem()
        pending = [name]
        while pending:
            one = pending.pop()
            for other in [other for other in remaining if frozenset((one, other)) in overlapping]:
                mask |= remaining.pop(other)
                pending.append(other)
        result.append(mask)
    return result


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _name(position: int) -> str:
    return f"position {position}"


class _Follow:
    """Computes first and follow sets of rules."""

    def __init__(self, rules: Rules, nullable: set[str], first_sets: dict[str, int]) -> None:
        self._rules = rules
        self._nullable = set(nullable)
        self._firsts = dict(first_sets)
        self._follow: dict[str, int] = {}
        self._pending: list[str] = []
        self._compute_first_sets()

    def first(self, name: str) -> int:
        """Return the first set of a rule."""
        return self._firsts.get(name, 0)

    def follow_sets_from(self, root: str) -> dict[str, int]:
        """Return the follow set of each rule and each position."""
        self._follow[root] = 0
        self._pending = [root]
        while self._pending:
            name = self._pending.pop()
            self._visit(self._rules[name], self._follow[name])
        return self._follow

    def _compute_first_sets(self) -> None:
        users: dict[str, set[str]] = {}
        for name, node in self._rules.items():
            for one in walk(node):
                if isinstance(one, Ref):
                    users.setdefault(one.name, set()).add(name)
        pending = dict.fromkeys(reversed(self._rules))
        while pending:
            name, _ = pending.popitem()
            first, is_nullable = self._first(self._rules[name])
            if first != self._firsts.get(name, 0) or (is_nullable and name not in self._nullable):
                self._firsts[name] = first
                if is_nullable:
                    self._nullable.add(name)
                pending.update(dict.fromkeys(users.get(name, ())))

    def _first(self, node: Node) -> tuple[int, bool]:
        """Return the first set of a node, and whether it matches the empty text."""
        if isinstance(node, Ref):
            return self._firsts.get(node.name, 0), node.name in self._nullable
        if isinstance(node, Seq):
            mask = 0
            for part in node.parts:
                first, is_nullable = self._first(part)
                mask |= first
                if not is_nullable:
                    return mask, False
            return mask, True
        pairs = [self._first(child) for child in children(node)]
        mask = 0
        for first, _ in pairs:
            mask |= first
        is_nullable = any(one for _, one in pairs)
        return mask, is_nullable or (isinstance(node, Repeat) and node.min_count == 0)

    def _visit(self, node: Node, after: int) -> None:
        if isinstance(node, Ref):
            known = self._follow.get(node.name)
            if known is None or after & ~known:
                self._follow[node.name] = after | (known or 0)
                if node.name in self._rules:
                    self._pending.append(node.name)
        elif isinstance(node, Seq):
            for part in reversed(node.parts):
                self._visit(part, after)
                first, is_nullable = self._first(part)
                after = first | after if is_nullable else first
        elif isinstance(node, Repeat):
            self._visit(node.part, after | (0 if node.max_count == 1 else self._first(node.part)[0]))
        else:
            for child in children(node):
                self._visit(child, after)
