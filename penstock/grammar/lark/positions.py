"""Positions of lexemes in rules. Computes which positions can follow each other or start together."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.grammar.lark.nodes import Alt, Node, Ref, Repeat, Rules, Seq, children, walk


class LexemePositions:
    """The positions of a grammar, that is, the occurrences of lexemes in rules.

    A group is a set of positions, stored as an integer with one bit per position.

    Attributes:
        start: the group of positions at which a text can start.
        follow_sets: lexeme -> set of characters that can follow it, as a bit mask.

    Args:
        rules: rules over lexemes.
        lexemes: all lexemes by name.
        nullable_lexemes: the lexemes that match the empty text.
        first_sets: lexeme -> set of characters that it can start with, as a bit mask.
        root: the name of the start rule.
    """

    def __init__(
        self,
        rules: Rules,
        lexemes: dict[str, Node],
        nullable_lexemes: set[str],
        first_sets: dict[str, int],
        root: str,
    ) -> None:
        self._lexemes = lexemes
        self._lexeme_names: list[str] = []  # the lexeme at each position
        numbered_rules = {name: self._with_positions(node) for name, node in rules.items()}
        names = [_name(position) for position in range(len(self._lexeme_names))]
        bits = {name: 1 << position for position, name in enumerate(names)}
        nullable_positions = {
            name
            for name, lexeme_name in zip(names, self._lexeme_names, strict=True)
            if lexeme_name in nullable_lexemes
        }
        first_and_follow = _FirstAndFollowSets(numbered_rules, nullable_positions, bits)
        follow_masks = first_and_follow.follow_sets_from(root)
        self.start = first_and_follow.first(root)
        self._follow_masks = [follow_masks.get(name, 0) for name in names]  # groups, by position
        self.follow_sets: dict[str, int] = dict.fromkeys(lexemes, 0)
        for position, lexeme_name in enumerate(self._lexeme_names):
            for next_position in _bits(self._follow_masks[position]):
                self.follow_sets[lexeme_name] |= first_sets[self._lexeme_names[next_position]]

    def lexemes_at(self, group: int) -> frozenset[str]:
        """Return the names of the lexemes at the positions of a group."""
        return frozenset(self._lexeme_names[position] for position in _bits(group))

    def next_groups(self, group: int, overlapping: set[frozenset[str]]) -> list[int]:
        """Return the groups of positions that can follow a group.

        There is one group for each set of lexemes of `group` that overlap directly or through other lexemes.

        Args:
            group: the positions.
            overlapping: pairs of lexemes that match a common text, and therefore can end together.
        """
        masks_by_lexeme: dict[str, int] = {}
        for position in _bits(group):
            lexeme_name = self._lexeme_names[position]
            masks_by_lexeme[lexeme_name] = masks_by_lexeme.get(lexeme_name, 0) | self._follow_masks[position]
        return _merge_overlapping(masks_by_lexeme, overlapping)

    def _with_positions(self, node: Node) -> Node:
        """Return the node with a separate name for each occurrence of a lexeme."""
        if isinstance(node, Ref) and node.name in self._lexemes:
            self._lexeme_names.append(node.name)
            return Ref(_name(len(self._lexeme_names) - 1))
        if isinstance(node, Seq):
            return Seq(tuple(map(self._with_positions, node.parts)))
        if isinstance(node, Alt):
            return Alt(tuple(map(self._with_positions, node.options)))
        if isinstance(node, Repeat):
            return Repeat(self._with_positions(node.part), node.min_count, node.max_count)
        return node


def _merge_overlapping(masks: dict[str, int], overlapping: set[frozenset[str]]) -> list[int]:
    """Combine by OR the masks of lexemes that overlap directly or through other lexemes; return all masks."""
    result: list[int] = []
    remaining_masks = dict(masks)
    while remaining_masks:
        name, mask = remaining_masks.popitem()
        pending = [name]
        while pending:
            merged_name = pending.pop()
            overlapping_names = [
                candidate
                for candidate in remaining_masks
                if frozenset((merged_name, candidate)) in overlapping
            ]
            for overlapping_name in overlapping_names:
                mask |= remaining_masks.pop(overlapping_name)
                pending.append(overlapping_name)
        result.append(mask)
    return result


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest_bit = mask & -mask
        yield lowest_bit.bit_length() - 1
        mask ^= lowest_bit


def _name(position: int) -> str:
    return f"position {position}"


class _FirstAndFollowSets:
    """Computes the first and follow sets of rules over positions. A set is a bit mask of positions."""

    def __init__(self, rules: Rules, nullable_rules: set[str], first_sets: dict[str, int]) -> None:
        self._rules = rules
        self._nullable_rules = set(nullable_rules)
        self._first_sets = dict(first_sets)
        self._follow: dict[str, int] = {}
        self._pending_rules: list[str] = []
        self._compute_first_sets()

    def first(self, name: str) -> int:
        """Return the first set of a rule or position."""
        return self._first_sets.get(name, 0)

    def follow_sets_from(self, root: str) -> dict[str, int]:
        """Return the follow sets of the rules and positions that can be reached from the start rule."""
        self._follow[root] = 0
        self._pending_rules = [root]
        while self._pending_rules:
            name = self._pending_rules.pop()
            self._add_follow_set(self._rules[name], self._follow[name])
        return self._follow

    def _compute_first_sets(self) -> None:
        rules_by_reference: dict[str, set[str]] = {}
        for name, node in self._rules.items():
            for child in walk(node):
                if isinstance(child, Ref):
                    rules_by_reference.setdefault(child.name, set()).add(name)
        pending = dict.fromkeys(reversed(self._rules))
        while pending:
            name, _ = pending.popitem()
            first, is_nullable = self._first_set(self._rules[name])
            if first != self._first_sets.get(name, 0) or (is_nullable and name not in self._nullable_rules):
                self._first_sets[name] = first
                if is_nullable:
                    self._nullable_rules.add(name)
                pending.update(dict.fromkeys(rules_by_reference.get(name, ())))

    def _first_set(self, node: Node) -> tuple[int, bool]:
        """Return the first set of a node, and whether it matches the empty text."""
        if isinstance(node, Ref):
            return self._first_sets.get(node.name, 0), node.name in self._nullable_rules
        if isinstance(node, Seq):
            mask = 0
            for part in node.parts:
                first, is_nullable = self._first_set(part)
                mask |= first
                if not is_nullable:
                    return mask, False
            return mask, True
        pairs = [self._first_set(child) for child in children(node)]
        mask = 0
        for first, _ in pairs:
            mask |= first
        is_nullable = any(child_is_nullable for _, child_is_nullable in pairs)
        return mask, is_nullable or (isinstance(node, Repeat) and node.min_count == 0)

    def _add_follow_set(self, node: Node, follow: int) -> None:
        if isinstance(node, Ref):
            old_follow = self._follow.get(node.name)
            if old_follow is None or follow & ~old_follow:
                self._follow[node.name] = follow | (old_follow or 0)
                if node.name in self._rules:
                    self._pending_rules.append(node.name)
        elif isinstance(node, Seq):
            for part in reversed(node.parts):
                self._add_follow_set(part, follow)
                first, is_nullable = self._first_set(part)
                follow = first | follow if is_nullable else first
        elif isinstance(node, Repeat):
            self._add_follow_set(
                node.part, follow | (0 if node.max_count == 1 else self._first_set(node.part)[0])
            )
        else:
            for child in children(node):
                self._add_follow_set(child, follow)
