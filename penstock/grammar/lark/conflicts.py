"""Finds lexemes whose longest match may differ from the match that the rules need.

A longest-match lexer is exact if no text w of a lexeme, followed by a character that the rules allow after
that lexeme, is the prefix of a longer text of any lexeme. This module searches for such texts among the
lexemes that may start at the same position (`positions`). It treats long repetitions as unbounded and ignores
the nesting of rules. It may therefore report a conflict that does not exist, but it never misses one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

from penstock.grammar.lark.nodes import (
    ANY_CHARACTER,
    Alt,
    Chars,
    FreeText,
    Node,
    Ranges,
    Ref,
    Repeat,
    Rules,
    Seq,
    Text,
    TextUntil,
    walk,
)
from penstock.grammar.lark.positions import LexemePositions

_MAX_COUNTED = 3  # repetitions with higher bounds are treated as unbounded
MAX_WORK = 600_000  # visits of automaton states; about two seconds


def find_conflicts(
    rules: Rules,
    lexemes: dict[str, Node],
    parts: Rules,
    root: str,
    check_time: Callable[[], None],
) -> tuple[dict[str, str], int]:
    """Return the lexemes that can continue at a position where a lexeme must end.

    Maps the name of each to the name of the lexeme that must end, which may be the same one.

    Args:
        rules: rules over lexemes.
        lexemes: their nodes refer to rules of ``parts``.
        parts: the rules that lexemes refer to.
        root: the name of the first rule.
        check_time: called regularly; raises at the time limit.

    Returns:
        The names, and the number of visited states. Above `MAX_WORK` the search was not finished.
    """
    atoms = _Atoms(lexemes, parts)
    nfa = _Nfa(atoms, parts)
    try:
        for name, node in lexemes.items():
            nfa.add_lexeme(name, node)
        check_time()
        positions = LexemePositions(rules, lexemes, nfa.nullable, nfa.first_of_lexemes(), root)
        check_time()
        found: dict[str, str] = {}
        known: dict[frozenset[str], set[frozenset[str]]] = {}  # lexemes of a group -> overlapping pairs
        seen, pending = {positions.start}, [positions.start]
        while pending:
            group = pending.pop()
            names = positions.lexemes_at(group)
            if names not in known:
                check_time()
                longer, known[names] = _longer_matches(nfa, names, positions.follow_sets)
                for name, other in longer.items():
                    found.setdefault(name, other)
            for following in positions.next_groups(group, known[names]):
                nfa.count(1)
                if following not in seen:
                    seen.add(following)
                    pending.append(following)
        return found, nfa.work
    except _WorkLimitError:
        return {}, nfa.work


class _WorkLimitError(Exception):
    pass


def _longer_matches(
    nfa: _Nfa, names: frozenset[str], follow: dict[str, int]
) -> tuple[dict[str, str], set[frozenset[str]]]:
    """Search the deterministic automaton of lexemes that may start at the same position.

    Returns:
        The lexemes that can continue where others must end, and the pairs that have a text in common.
    """
    found: dict[str, str] = {}
    overlapping: set[frozenset[str]] = set()
    start = nfa.closure([nfa.starts[name] for name in sorted(names)])
    seen, pending = {start}, [start]
    while pending:
        states = pending.pop()
        if states != start:
            ends = sorted(nfa.finals[state] for state in states if state in nfa.finals)
            overlapping.update(frozenset(pair) for pair in combinations(ends, 2))
            for ended in ends:
                after = follow.get(ended, 0)
                for state in states:
                    if any(mask & after for mask, _ in nfa.edges[state]):
                        found.setdefault(nfa.owners[state], ended)
        for targets in _steps(nfa, states):
            following = nfa.closure(targets)
            if following not in seen:
                seen.add(following)
                pending.append(following)
    return {name: other for name, other in found.items() if nfa.sizes[name] > 1}, overlapping


def _steps(nfa: _Nfa, states: frozenset[int]) -> Iterator[set[int]]:
    """Yield the sets of states that one character leads to, each set once."""
    edges = [edge for state in states for edge in nfa.edges[state]]
    classes: dict[int, set[int]] = {}  # disjoint sets of atoms -> targets
    for mask, target in edges:
        rest = mask
        for known in list(classes):
            common = known & rest
            if not common:
                continue
            targets = classes.pop(known)
            if known & ~common:
                classes[known & ~common] = targets
            classes[common] = targets | {target}
            rest &= ~common
            if not rest:
                break
        if rest:
            classes[rest] = {target}
    yield from classes.values()


class _Atoms:
    """Equivalence classes of characters that no expression distinguishes, as bits of an integer."""

    def __init__(self, lexemes: dict[str, Node], parts: Rules) -> None:
        bounds = {0, 0xD800, 0xE000, 0x110000}
        pending, seen = list(lexemes.values()), set[str]()
        while pending:
            for one in walk(pending.pop()):
                if isinstance(one, Chars):
                    bounds.update(bound for low, high in one.ranges for bound in (low, high + 1))
                elif isinstance(one, Text | FreeText | TextUntil):
                    points = {ord(char) for text in _texts(one) for char in text}
                    bounds.update(bound for point in points for bound in (point, point + 1))
                elif isinstance(one, Ref) and one.name not in seen:
                    seen.add(one.name)
                    pending.append(parts[one.name])
        self._index = {bound: index for index, bound in enumerate(sorted(bounds))}
        self._masks: dict[Ranges, int] = {}
        self.everything = self.mask(ANY_CHARACTER)

    def mask(self, ranges: Ranges) -> int:
        """Return the bits of character ranges."""
        if ranges not in self._masks:
            mask = 0
            for low, high in ranges:
                mask |= (1 << self._index[high + 1]) - (1 << self._index[low])
            self._masks[ranges] = mask
        return self._masks[ranges]

    def point(self, char: str) -> int:
        """Return the bit of one character."""
        return self.mask(((ord(char), ord(char)),))


def _texts(node: Text | FreeText | TextUntil) -> tuple[str, ...]:
    if isinstance(node, Text):
        return (node.text,)
    return node.excludes if isinstance(node, FreeText) else (node.end, *node.others, *node.excludes)


class _Nfa:
    """A nondeterministic automaton of all lexemes."""

    def __init__(self, atoms: _Atoms, parts: Rules) -> None:
        self._atoms = atoms
        self._parts = parts
        self._owner = ""
        self._closures: dict[int, frozenset[int]] = {}
        self._empty: list[list[int]] = []
        self.edges: list[list[tuple[int, int]]] = []  # per state: (mask of characters, next state)
        self.owners: list[str] = []
        self.starts: dict[str, int] = {}
        self.finals: dict[int, str] = {}
        self.sizes: dict[str, int] = {}
        self.nullable: set[str] = set()
        self.work = 0

    def add_lexeme(self, name: str, node: Node) -> None:
        self._owner = name
        before = len(self.edges)
        start = self._state()
        end = self._add(node, start)
        self.starts[name] = start
        self.finals[end] = name
        single = isinstance(node, Chars) or (isinstance(node, Text) and len(node.text) == 1)
        self.sizes[name] = 1 if single else len(self.edges) - before
        if end in self.closure([start]):
            self.nullable.add(name)

    def first_of_lexemes(self) -> dict[str, int]:
        """Return the characters that each lexeme may begin with."""
        result = {}
        for name, start in self.starts.items():
            mask = 0
            for state in self.closure([start]):
                for one, _ in self.edges[state]:
                    mask |= one
            result[name] = mask
        return result

    def closure(self, states: object) -> frozenset[int]:
        """Return the states and all states reachable from them by empty transitions."""
        result: set[int] = set()
        for state in states:  # type: ignore[attr-defined]
            if state not in self._closures:
                found, pending = {state}, [state]
                while pending:
                    new = [one for one in self._empty[pending.pop()] if one not in found]
                    found.update(new)
                    pending += new
                used = (one for one in found if self.edges[one] or not self._empty[one])
                self._closures[state] = frozenset(used)
                self.count(len(found))
            result |= self._closures[state]
        self.count(len(result))
        return frozenset(result)

    def count(self, work: int) -> None:
        """Count work.

        Raises:
            _WorkLimitError: the sum exceeds `MAX_WORK`.
        """
        self.work += work
        if self.work > MAX_WORK:
            raise _WorkLimitError

    def _state(self) -> int:
        self.edges.append([])
        self._empty.append([])
        self.owners.append(self._owner)
        return len(self.edges) - 1

    def _add(self, node: Node, start: int) -> int:
        """Add a path for a node and return its end state, which has no transitions yet."""
        if isinstance(node, Chars):
            end = self._state()
            self.edges[start].append((self._atoms.mask(node.ranges), end))
            return end
        if isinstance(node, Text):
            for char in node.text:
                end = self._state()
                self.edges[start].append((self._atoms.point(char), end))
                start = end
            return start
        if isinstance(node, Seq):
            for part in node.parts:
                start = self._add(part, start)
            return start
        if isinstance(node, Alt):
            end = self._state()
            for option in node.options:
                first = self._state()
                self._empty[start].append(first)
                self._empty[self._add(option, first)].append(end)
            return end
        if isinstance(node, Repeat):
            return self._add_repeat(node, start)
        if isinstance(node, Ref):
            return self._add(self._parts[node.name], start)
        assert isinstance(node, FreeText | TextUntil)
        return self._add_free_text(node, start)

    def _add_repeat(self, node: Repeat, start: int) -> int:
        for _ in range(min(node.min_count, _MAX_COUNTED)):
            start = self._add(node.part, start)
        end = self._state()
        if node.max_count is None or node.max_count > _MAX_COUNTED:
            loop = self._state()
            self._empty[start].append(loop)
            self._empty[self._add(node.part, loop)].append(loop)
            self._empty[loop].append(end)
            return end
        for _ in range(node.max_count - node.min_count):
            first = self._state()
            self._empty[start] += [first, end]
            start = self._add(node.part, first)
        self._empty[start].append(end)
        return end

    def _add_free_text(self, node: FreeText | TextUntil, start: int) -> int:
        """Add an Aho-Corasick automaton of several words, with one state per prefix of a word."""
        words = [word for word in _texts(node) if word]
        heads = {word[:length] for word in words for length in range(len(word) + 1)} | {""}
        end = self._state()
        states = {head: self._state() for head in heads if not _ends_with_any(head, words)}
        self._empty[start].append(states[""])
        chars = {char for word in words for char in word}
        for head, state in states.items():
            others = self._atoms.everything
            for char in chars:
                others &= ~self._atoms.point(char)
                text = head + char
                if isinstance(node, TextUntil) and text.endswith(node.end):
                    if _ends_with_any(text, list(node.excludes)):
                        continue
                    self.edges[state].append((self._atoms.point(char), end))
                elif not _ends_with_any(text, words):
                    target = next(text[at:] for at in range(len(text) + 1) if text[at:] in states)
                    self.edges[state].append((self._atoms.point(char), states[target]))
            if others:
                self.edges[state].append((others, states[""]))
            if isinstance(node, FreeText):
                self._empty[state].append(end)
        return end


def _ends_with_any(text: str, words: list[str]) -> bool:
    return any(text.endswith(word) for word in words)
