"""Finds conflicts: lexemes whose longest match can differ from the match that the rules need.

A conflict is a text w of a lexeme and a character c such that

- the rules allow c after the lexeme, so that the lexeme may end after w, and
- w c is the prefix of a text of a lexeme that can start at the same position.

A longest-match lexer then continues with the longer text, although the rules may need the shorter text.
If there are no conflicts, the longest match is always right. The search treats long repetitions as unbounded
and ignores the nesting of rules. It may therefore report a conflict that does not exist, but a
completed search never misses a conflict.
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

_MAX_EXPANDED_COUNT = 3  # repetitions with higher bounds are treated as unbounded
MAX_WORK = 600_000  # maximum number of visited automaton states, which takes about two seconds


def find_conflicts(
    rules: Rules,
    lexemes: dict[str, Node],
    lexeme_rules: Rules,
    root: str,
    check_time: Callable[[], None],
) -> tuple[dict[str, str], int]:
    """Find the conflicts of a grammar that is divided into lexemes and rules (`lexemes.Division`).

    Args:
        rules: rules over lexemes.
        lexemes: name -> node, which may refer to rules of ``lexeme_rules``.
        lexeme_rules: the rules that lexemes refer to.
        root: the name of the start rule.
        check_time: called regularly; raises at the time limit.

    Returns:
        ({name of the lexeme that matches the longer text: name of the lexeme that matches the shorter text},
        number of visited states). Both names can be equal. The dict has at most one conflict per key. If the
        number of visited states exceeds `MAX_WORK`, the search was aborted and the dict is empty.
    """
    classes = _CharacterClasses(lexemes, lexeme_rules)
    nfa = _Nfa(classes, lexeme_rules)
    try:
        for name, node in lexemes.items():
            nfa.add_lexeme(name, node)
        check_time()
        positions = LexemePositions(rules, lexemes, nfa.nullable_lexemes, nfa.first_sets(), root)
        check_time()
        conflicts: dict[str, str] = {}
        # lexemes at a group of positions -> pairs of lexemes that match a common text
        overlapping_pairs: dict[frozenset[str], set[frozenset[str]]] = {}
        visited_groups, pending = {positions.start}, [positions.start]
        while pending:
            group = pending.pop()
            names = positions.lexemes_at(group)
            if names not in overlapping_pairs:
                check_time()
                new_conflicts, overlapping_pairs[names] = _longer_matches(nfa, names, positions.follow_sets)
                for name, ending_lexeme in new_conflicts.items():
                    conflicts.setdefault(name, ending_lexeme)
            for next_group in positions.next_groups(group, overlapping_pairs[names]):
                nfa.add_work(1)
                if next_group not in visited_groups:
                    visited_groups.add(next_group)
                    pending.append(next_group)
        return conflicts, nfa.work
    except _WorkLimitError:
        return {}, nfa.work


class _WorkLimitError(Exception):
    pass


def _longer_matches(
    nfa: _Nfa, lexeme_names: frozenset[str], follow_sets: dict[str, int]
) -> tuple[dict[str, str], set[frozenset[str]]]:
    """Find the conflicts among the lexemes ``lexeme_names``, which may start at the same position.

    Returns:
        ({lexeme that matches the longer text: lexeme that matches the shorter text}, pairs of lexemes that
        match a common text). The keys of the dict exclude lexemes of a single character, because their match
        cannot continue.
    """
    conflicts: dict[str, str] = {}
    overlapping: set[frozenset[str]] = set()
    start = nfa.closure([nfa.start_states[name] for name in sorted(lexeme_names)])
    visited_state_sets, pending = {start}, [start]
    while pending:
        states = pending.pop()
        if states != start:
            ending_lexemes = sorted(
                nfa.lexeme_by_final_state[state] for state in states if state in nfa.lexeme_by_final_state
            )
            overlapping.update(frozenset(pair) for pair in combinations(ending_lexemes, 2))
            for ending_lexeme in ending_lexemes:
                follow_mask = follow_sets.get(ending_lexeme, 0)
                for state in states:
                    if any(mask & follow_mask for mask, _ in nfa.edges[state]):
                        conflicts.setdefault(nfa.lexeme_by_state[state], ending_lexeme)
        for targets in _successors(nfa, states):
            next_states = nfa.closure(targets)
            if next_states not in visited_state_sets:
                visited_state_sets.add(next_states)
                pending.append(next_states)
    return {
        name: ending_lexeme for name, ending_lexeme in conflicts.items() if nfa.num_states_by_lexeme[name] > 1
    }, overlapping


def _successors(nfa: _Nfa, states: frozenset[int]) -> Iterator[set[int]]:
    """Yield the target states of the transitions: one set of states per class of characters."""
    edges = [edge for state in states for edge in nfa.edges[state]]
    classes: dict[int, set[int]] = {}  # disjoint sets of character classes -> target states
    for mask, target in edges:
        remaining_mask = mask
        for class_mask in list(classes):
            common = class_mask & remaining_mask
            if not common:
                continue
            targets = classes.pop(class_mask)
            if class_mask & ~common:
                classes[class_mask & ~common] = targets
            classes[common] = targets | {target}
            remaining_mask &= ~common
            if not remaining_mask:
                break
        if remaining_mask:
            classes[remaining_mask] = {target}
    yield from classes.values()


class _CharacterClasses:
    """Equivalence classes of characters: two characters in a class occur in the same ranges of all lexemes.

    A set of classes is an integer with one bit per class.
    """

    def __init__(self, lexemes: dict[str, Node], lexeme_rules: Rules) -> None:
        bounds = {0, 0xD800, 0xE000, 0x110000}
        pending, seen = list(lexemes.values()), set[str]()
        while pending:
            for node in walk(pending.pop()):
                if isinstance(node, Chars):
                    bounds.update(bound for low, high in node.ranges for bound in (low, high + 1))
                elif isinstance(node, Text | FreeText | TextUntil):
                    points = {ord(char) for text in _literal_texts(node) for char in text}
                    bounds.update(bound for point in points for bound in (point, point + 1))
                elif isinstance(node, Ref) and node.name not in seen:
                    seen.add(node.name)
                    pending.append(lexeme_rules[node.name])
        self._index = {bound: index for index, bound in enumerate(sorted(bounds))}
        self._masks: dict[Ranges, int] = {}
        self.all_characters = self.mask(ANY_CHARACTER)

    def mask(self, ranges: Ranges) -> int:
        """Return the classes of the characters in ``ranges``, as a bit mask."""
        if ranges not in self._masks:
            mask = 0
            for low, high in ranges:
                mask |= (1 << self._index[high + 1]) - (1 << self._index[low])
            self._masks[ranges] = mask
        return self._masks[ranges]

    def class_of(self, char: str) -> int:
        """Return the class of one character, as a bit mask."""
        return self.mask(((ord(char), ord(char)),))


def _literal_texts(node: Text | FreeText | TextUntil) -> tuple[str, ...]:
    if isinstance(node, Text):
        return (node.text,)
    return node.excludes if isinstance(node, FreeText) else (node.end, *node.other_ends, *node.excludes)


class _Nfa:
    """A nondeterministic finite automaton (NFA) with the paths of all lexemes."""

    def __init__(self, classes: _CharacterClasses, lexeme_rules: Rules) -> None:
        self._classes = classes
        self._lexeme_rules = lexeme_rules
        self._current_lexeme = ""
        self._closures: dict[int, frozenset[int]] = {}
        self._empty_edges: list[list[int]] = []
        self.edges: list[list[tuple[int, int]]] = []  # per state: (mask of characters, next state)
        self.lexeme_by_state: list[str] = []  # state -> name of its lexeme
        self.start_states: dict[str, int] = {}  # lexeme -> its start state
        self.lexeme_by_final_state: dict[int, str] = {}
        self.num_states_by_lexeme: dict[str, int] = {}  # 1 for a lexeme that is a single character
        self.nullable_lexemes: set[str] = set()
        self.work = 0

    def add_lexeme(self, name: str, node: Node) -> None:
        self._current_lexeme = name
        num_states = len(self.edges)
        start = self._add_state()
        end = self._add_node(node, start)
        self.start_states[name] = start
        self.lexeme_by_final_state[end] = name
        is_single_character = isinstance(node, Chars) or (isinstance(node, Text) and len(node.text) == 1)
        self.num_states_by_lexeme[name] = 1 if is_single_character else len(self.edges) - num_states
        if end in self.closure([start]):
            self.nullable_lexemes.add(name)

    def first_sets(self) -> dict[str, int]:
        """Return for each lexeme the classes of the characters with which it can begin, as a bit mask."""
        result = {}
        for name, start in self.start_states.items():
            mask = 0
            for state in self.closure([start]):
                for edge_mask, _ in self.edges[state]:
                    mask |= edge_mask
            result[name] = mask
        return result

    def closure(self, states: object) -> frozenset[int]:
        """Return the states and all states reachable from them by empty transitions.

        States that have only empty transitions are left out.
        """
        result: set[int] = set()
        for state in states:  # type: ignore[attr-defined]
            if state not in self._closures:
                reachable_states, pending = {state}, [state]
                while pending:
                    new_states = [
                        successor
                        for successor in self._empty_edges[pending.pop()]
                        if successor not in reachable_states
                    ]
                    reachable_states.update(new_states)
                    pending += new_states
                states_with_edges = (
                    successor
                    for successor in reachable_states
                    if self.edges[successor] or not self._empty_edges[successor]
                )
                self._closures[state] = frozenset(states_with_edges)
                self.add_work(len(reachable_states))
            result |= self._closures[state]
        self.add_work(len(result))
        return frozenset(result)

    def add_work(self, work: int) -> None:
        """Add to the number of visited states.

        Raises:
            _WorkLimitError: the number exceeds `MAX_WORK`.
        """
        self.work += work
        if self.work > MAX_WORK:
            raise _WorkLimitError

    def _add_state(self) -> int:
        self.edges.append([])
        self._empty_edges.append([])
        self.lexeme_by_state.append(self._current_lexeme)
        return len(self.edges) - 1

    def _add_node(self, node: Node, start: int) -> int:
        """Add the states of a node after `start`. Return its end state, which has no transitions yet."""
        if isinstance(node, Chars):
            end = self._add_state()
            self.edges[start].append((self._classes.mask(node.ranges), end))
            return end
        if isinstance(node, Text):
            for char in node.text:
                end = self._add_state()
                self.edges[start].append((self._classes.class_of(char), end))
                start = end
            return start
        if isinstance(node, Seq):
            for part in node.parts:
                start = self._add_node(part, start)
            return start
        if isinstance(node, Alt):
            end = self._add_state()
            for option in node.options:
                option_start = self._add_state()
                self._empty_edges[start].append(option_start)
                self._empty_edges[self._add_node(option, option_start)].append(end)
            return end
        if isinstance(node, Repeat):
            return self._add_repeat(node, start)
        if isinstance(node, Ref):
            return self._add_node(self._lexeme_rules[node.name], start)
        assert isinstance(node, FreeText | TextUntil)
        return self._add_free_text(node, start)

    def _add_repeat(self, node: Repeat, start: int) -> int:
        for _ in range(min(node.min_count, _MAX_EXPANDED_COUNT)):
            start = self._add_node(node.part, start)
        end = self._add_state()
        if node.max_count is None or node.max_count > _MAX_EXPANDED_COUNT:
            loop = self._add_state()
            self._empty_edges[start].append(loop)
            self._empty_edges[self._add_node(node.part, loop)].append(loop)
            self._empty_edges[loop].append(end)
            return end
        for _ in range(node.max_count - node.min_count):
            part_start = self._add_state()
            self._empty_edges[start] += [part_start, end]
            start = self._add_node(node.part, part_start)
        self._empty_edges[start].append(end)
        return end

    def _add_free_text(self, node: FreeText | TextUntil, start: int) -> int:
        """Add an Aho-Corasick automaton of the node's words.

        It has one state for each prefix of a word, except prefixes that end with a word.
        """
        words = [word for word in _literal_texts(node) if word]
        prefixes = {word[:length] for word in words for length in range(len(word) + 1)} | {""}
        end = self._add_state()
        states = {prefix: self._add_state() for prefix in prefixes if not _ends_with_any(prefix, words)}
        self._empty_edges[start].append(states[""])
        chars = {char for word in words for char in word}
        for prefix, state in states.items():
            other_characters = self._classes.all_characters
            for char in chars:
                other_characters &= ~self._classes.class_of(char)
                text = prefix + char
                if isinstance(node, TextUntil) and text.endswith(node.end):
                    if _ends_with_any(text, list(node.excludes)):
                        continue
                    self.edges[state].append((self._classes.class_of(char), end))
                elif not _ends_with_any(text, words):
                    target = next(text[index:] for index in range(len(text) + 1) if text[index:] in states)
                    self.edges[state].append((self._classes.class_of(char), states[target]))
            if other_characters:
                self.edges[state].append((other_characters, states[""]))
            if isinstance(node, FreeText):
                self._empty_edges[state].append(end)
        return end


def _ends_with_any(text: str, words: list[str]) -> bool:
    return any(text.endswith(word) for word in words)
