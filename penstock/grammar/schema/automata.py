"""Computes automata of texts within a length bound that match all required and no excluded expressions.

States are built from partial derivatives (Antimirov 1996). A position is the part of an expression that is
not matched yet. A state has the positions that a text can reach in each expression, and the text's length.
Repetitions are expanded only when a state reaches them, so a bound such as {0,100000} takes little memory.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.grammar.schema import regex
from penstock.grammar.schema.ebnf import Ranges, union

MAX_STATES = 400  # of a minimal automaton
_MAX_UNMINIMIZED_STATES = 2000  # maximum states before minimization
_MAX_POSITIONS = 4000  # maximum positions visited to compute the transitions of one position
_MAX_WORK = 300_000  # maximum number of range boundaries and positions visited for one expression

_END = 0  # the position at the end of an expression
_Row: TypeAlias = list[tuple[int, int, frozenset[int]]]  # (first, last character, next positions), ascending
_State: TypeAlias = tuple[tuple[frozenset[int], ...], int]  # (positions per expression, character count)


class TooLargeError(Exception):
    """An automaton has more states than `MAX_STATES`, or its computation exceeds a limit of this module."""


@dataclass(slots=True)
class Automaton:
    """A deterministic finite automaton. State 0 is the start state.

    Attributes:
        transitions: for each state, pairs (characters, target state).
        accepting: for each state, whether a text may end there.
    """

    transitions: list[list[tuple[Ranges, int]]] = field(default_factory=list)
    accepting: list[bool] = field(default_factory=list)

    @property
    def min_lengths(self) -> list[int]:
        """For each state, the fewest characters to an accepting state; -1 if none can be reached."""
        predecessors = _predecessors(self)
        lengths = [0 if is_end else -1 for is_end in self.accepting]
        pending = [state for state, is_end in enumerate(self.accepting) if is_end]
        for state in pending:
            for predecessor in predecessors[state]:
                if lengths[predecessor] < 0:
                    lengths[predecessor] = lengths[state] + 1
                    pending.append(predecessor)
        return lengths


@dataclass(frozen=True, slots=True)
class LengthBound:
    """Minimum and maximum number of characters of a text; None means no maximum."""

    min_count: int = 0
    max_count: int | None = None


def intersection(
    required: Sequence[regex.RegexNode],
    excluded: Sequence[regex.RegexNode],
    bound: LengthBound,
) -> Automaton | None:
    """Return the minimal automaton of texts within the bound that match all required and no excluded trees.

    Returns None if there is no such text.

    Raises:
        TooLargeError: the automaton has more than `MAX_STATES` states, or exceeds a limit of this module.
    """
    product = _Product(required, excluded, bound)
    start = product.start
    state_numbers = {start: 0}
    states = [start]
    steps: list[list[tuple[Ranges, int]]] = []
    for state in states:
        ranges_by_target: dict[_State, list[tuple[int, int]]] = {}
        for ranges, target in product.steps(state):
            ranges_by_target.setdefault(target, []).extend(ranges)
        row: list[tuple[Ranges, int]] = []
        for target, ranges in ranges_by_target.items():
            if target not in state_numbers:
                state_numbers[target] = len(states)
                states.append(target)
                if len(states) > _MAX_UNMINIMIZED_STATES:
                    raise TooLargeError
            row.append((union(ranges), state_numbers[target]))
        steps.append(row)
    result = _minimize(_without_dead_states(Automaton(steps, [product.accepts(state) for state in states])))
    if result is not None and len(result.transitions) > MAX_STATES:
        raise TooLargeError
    return result


class _Positions:
    """The positions of one expression, and their transitions."""

    def __init__(self, tree: regex.RegexNode) -> None:
        self._nodes: dict[object, regex.RegexNode] = {}  # one object for equal subtrees
        self._position_numbers: dict[tuple[int, int], int] = {}
        self._nodes_and_next: list[tuple[regex.RegexNode, int] | None] = [None]  # (node, next position)
        self._lengths: list[tuple[int, int | None]] = [(0, 0)]  # per position: (min, max) to the end
        self._steps: dict[int, tuple[bool, list[tuple[Ranges, int]]]] = {}
        self._rows: dict[frozenset[int], _Row] = {}
        self._work = 0
        # id of a node -> minimum and maximum length of its texts
        self._node_lengths: dict[int, tuple[int, int | None]] = {}
        self.start = frozenset({self._position_of(self._with_shared_nodes(tree), _END)})

    def min_length(self, positions: frozenset[int]) -> int:
        """Return the minimum number of characters until the end of the expression."""
        return min(self._lengths[position][0] for position in positions)

    def max_length(self, positions: frozenset[int]) -> int | None:
        """Return the maximum number of characters until the end of the expression; None if unbounded."""
        max_lengths = [self._lengths[position][1] for position in positions]
        return None if None in max_lengths else max((length or 0 for length in max_lengths), default=0)

    def can_end(self, positions: frozenset[int]) -> bool:
        """Return whether a text may end at one of these positions."""
        return any(self._step(position)[0] for position in positions)

    def row(self, positions: frozenset[int]) -> _Row:
        """Return the transitions of a set of positions, ascending by characters."""
        if positions not in self._rows:
            self._rows[positions] = self._new_row(positions)
        return self._rows[positions]

    def _new_row(self, positions: frozenset[int]) -> _Row:
        events: list[tuple[int, int, int]] = []  # (boundary of a range, 1 or -1, position)
        for position in positions:
            for ranges, next_position in self._step(position)[1]:
                for low, high in ranges:
                    events += [(low, 1, next_position), (high + 1, -1, next_position)]
        self._add_work(len(events))
        result: _Row = []
        active_positions: Counter[int] = Counter()
        start = 0
        for boundary, group in itertools.groupby(sorted(events), key=lambda event: event[0]):
            if active_positions:
                self._add_work(len(active_positions))
                result.append((start, boundary - 1, frozenset(active_positions)))
            for _, change, next_position in group:
                active_positions[next_position] += change
                if not active_positions[next_position]:
                    del active_positions[next_position]
            start = boundary
        return result

    def _step(self, position: int) -> tuple[bool, list[tuple[Ranges, int]]]:
        """Return (whether a text may end at a position, the transitions of the position)."""
        if position not in self._steps:
            self._steps[position] = self._compute_step(position)
        return self._steps[position]

    def _compute_step(self, position: int) -> tuple[bool, list[tuple[Ranges, int]]]:
        can_end = False
        transitions: list[tuple[Ranges, int]] = []
        pending, seen = [position], set()
        while pending:
            current = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            self._add_work(1)
            if len(seen) > _MAX_POSITIONS:
                raise TooLargeError
            pair = self._nodes_and_next[current]
            if pair is None:
                can_end = True
                continue
            node, next_position = pair
            if isinstance(node, regex.Char):
                transitions.append((node.ranges, next_position))
            elif isinstance(node, regex.RegexSeq):
                for part in reversed(node.parts):
                    next_position = self._position_of(part, next_position)
                pending.append(next_position)
            elif isinstance(node, regex.RegexAlt):
                pending += [self._position_of(option, next_position) for option in node.options]
            else:
                assert isinstance(node, regex.RegexRepeat)
                if node.min_count == 0:
                    pending.append(next_position)
                if node.max_count != 0:
                    max_count = None if node.max_count is None else node.max_count - 1
                    remaining_repeat = self._repeat(node.part, max(node.min_count - 1, 0), max_count)
                    pending.append(
                        self._position_of(node.part, self._position_of(remaining_repeat, next_position))
                    )
        return can_end, transitions

    def _add_work(self, work: int) -> None:
        self._work += work
        if self._work > _MAX_WORK:
            raise TooLargeError

    def _position_of(self, node: regex.RegexNode, next_position: int) -> int:
        """Return the position for ``node`` followed by position ``next_position``."""
        key = (id(node), next_position)
        if key not in self._position_numbers:
            if id(node) not in self._node_lengths:
                self._node_lengths[id(node)] = regex.lengths(node)
            low, high = self._node_lengths[id(node)]
            next_min, next_max = self._lengths[next_position]
            self._position_numbers[key] = len(self._nodes_and_next)
            self._nodes_and_next.append((node, next_position))
            max_length = None if high is None or next_max is None else high + next_max
            self._lengths.append((low + next_min, max_length))
        return self._position_numbers[key]

    def _repeat(self, part: regex.RegexNode, min_count: int, max_count: int | None) -> regex.RegexNode:
        return self._nodes.setdefault(
            (regex.RegexRepeat, id(part), min_count, max_count), regex.RegexRepeat(part, min_count, max_count)
        )

    def _with_shared_nodes(self, node: regex.RegexNode) -> regex.RegexNode:
        """Return the tree with one object for equal subtrees, so that positions are compared by identity."""
        if isinstance(node, regex.RegexRepeat):
            return self._repeat(self._with_shared_nodes(node.part), node.min_count, node.max_count)
        if isinstance(node, regex.RegexSeq):
            parts = tuple(map(self._with_shared_nodes, node.parts))
            return self._nodes.setdefault((regex.RegexSeq, *map(id, parts)), regex.RegexSeq(parts))
        if isinstance(node, regex.RegexAlt):
            options = tuple(map(self._with_shared_nodes, node.options))
            return self._nodes.setdefault((regex.RegexAlt, *map(id, options)), regex.RegexAlt(options))
        return self._nodes.setdefault(node, node)


class _Product:
    """The product automaton of several expressions and a character count."""

    def __init__(
        self, required: Sequence[regex.RegexNode], excluded: Sequence[regex.RegexNode], bound: LengthBound
    ) -> None:
        self._operands = [_Positions(tree) for tree in (*required, *excluded)]
        self._required_operands = self._operands[: len(required)]
        self._bound = bound
        self.start = self._normalized_state(tuple(operand.start for operand in self._operands), 0)

    def accepts(self, state: _State) -> bool:
        """Return whether a text may end in this state."""
        position_sets, count = state
        if 0 <= count < self._bound.min_count:
            return False
        can_end = [
            operand.can_end(group) for operand, group in zip(self._operands, position_sets, strict=True)
        ]
        num_required = len(self._required_operands)
        return all(can_end[:num_required]) and not any(can_end[num_required:])

    def steps(self, state: _State) -> Iterator[tuple[Ranges, _State]]:
        """Yield (characters, next state)."""
        position_sets, count = state
        if self._bound.max_count is not None and count >= self._bound.max_count:
            return
        rows = [operand.row(group) for operand, group in zip(self._operands, position_sets, strict=True)]
        for low, high, target in _merged_rows(rows, len(self._required_operands)):
            if self._fits_max_length(target, count + 1):
                yield ((low, high),), self._normalized_state(target, count + 1 if count >= 0 else -1)

    def _fits_max_length(self, position_sets: tuple[frozenset[int], ...], count: int) -> bool:
        """Return whether each required expression can still end within the maximum length."""
        if self._bound.max_count is None or count <= 0:
            return True
        remaining = self._bound.max_count - count
        return all(
            operand.min_length(positions) <= remaining
            for operand, positions in zip(self._required_operands, position_sets, strict=False)
        )

    def _normalized_state(self, position_sets: tuple[frozenset[int], ...], count: int) -> _State:
        """Return the state with a normalized count: -1 if no further text can violate a length bound."""
        min_count, max_count = self._bound.min_count, self._bound.max_count
        if count >= 0 and max_count is not None:
            groups = zip(self._required_operands, position_sets, strict=False)
            max_lengths = [operand.max_length(positions) for operand, positions in groups]
            is_safe = any(length is not None and count + length <= max_count for length in max_lengths)
        else:
            is_safe = max_count is None or count < 0
        if count < 0 or (is_safe and count >= min_count):
            return position_sets, -1
        return position_sets, count


def _merged_rows(
    rows: Sequence[_Row], num_required: int
) -> Iterator[tuple[int, int, tuple[frozenset[int], ...]]]:
    """Yield (first character, last character, next positions) of ranges that all required operands accept."""
    events: list[tuple[int, int, frozenset[int]]] = []
    for index, row in enumerate(rows):
        for low, high, target in row:
            events += [(low, index, target), (high + 1, index, frozenset())]
    if num_required == 0:
        events += [(boundary, -1, frozenset()) for boundary in (0, 0xD800, 0xE000, 0x110000)]
    targets = [frozenset[int]()] * len(rows)
    start = 0
    # At a boundary, the end of one range comes before the start of another.
    events.sort(key=lambda event: (event[0], bool(event[2])))
    for boundary, group in itertools.groupby(events, key=lambda event: event[0]):
        is_character = start < boundary <= 0x110000 and start != 0xD800
        if is_character and all(targets[:num_required]):
            yield start, boundary - 1, tuple(targets)
        for _, index, target in group:
            if index >= 0:
                targets[index] = target
        start = boundary


def _without_dead_states(automaton: Automaton) -> Automaton | None:
    """Return the automaton without states that cannot reach an accepting state; None if state 0 cannot."""
    predecessors = _predecessors(automaton)
    pending = [state for state, is_end in enumerate(automaton.accepting) if is_end]
    live_states = set(pending)
    while pending:
        for predecessor in predecessors[pending.pop()]:
            if predecessor not in live_states:
                live_states.add(predecessor)
                pending.append(predecessor)
    if 0 not in live_states:
        return None
    new_numbers = {state: number for number, state in enumerate(sorted(live_states))}
    steps = [
        [(ranges, new_numbers[target]) for ranges, target in row if target in live_states]
        for row in (automaton.transitions[state] for state in new_numbers)
    ]
    return Automaton(steps, [automaton.accepting[state] for state in new_numbers])


def _minimize(automaton: Automaton | None) -> Automaton | None:
    """Return the minimal automaton (Moore's partition refinement); None for None."""
    if automaton is None:
        return None
    classes = _classes_by_length(automaton)
    num_classes = 0
    while len(set(classes)) > num_classes:
        num_classes = len(set(classes))
        numbers: dict[object, int] = {}
        classes = [
            numbers.setdefault((classes[state], _transitions_by_class(row, classes)), len(numbers))
            for state, row in enumerate(automaton.transitions)
        ]
    # Classes are numbered by first appearance, so the class of state 0 is 0.
    steps: list[list[tuple[Ranges, int]]] = [[] for _ in range(num_classes)]
    accepting = [False] * num_classes
    for state, class_ in enumerate(classes):
        accepting[class_] = automaton.accepting[state]
        row = _transitions_by_class(automaton.transitions[state], classes)
        steps[class_] = [(ranges, target) for target, ranges in row]
    return Automaton(steps, accepting)


def _predecessors(automaton: Automaton) -> list[list[int]]:
    """Return the predecessors of each state."""
    predecessors: list[list[int]] = [[] for _ in automaton.transitions]
    for state, row in enumerate(automaton.transitions):
        for _, target in row:
            predecessors[target].append(state)
    return predecessors


def _classes_by_length(automaton: Automaton) -> list[int]:
    """Return a class for each state, by `accepting` and the fewest and the most characters that can follow.

    Equivalent states are in the same class. Without these initial classes, the refinement would need one
    round per character of the longest text.
    """
    predecessors = _predecessors(automaton)
    min_lengths = automaton.min_lengths
    max_lengths = [-1] * len(automaton.transitions)  # -1 if the length is unbounded
    num_pending_targets = [len(row) for row in automaton.transitions]
    pending = [state for state, num_targets in enumerate(num_pending_targets) if not num_targets]
    for state in pending:
        row = automaton.transitions[state]
        max_lengths[state] = max((max_lengths[target] + 1 for _, target in row), default=0)
        for predecessor in predecessors[state]:
            num_pending_targets[predecessor] -= 1
            if not num_pending_targets[predecessor]:
                pending.append(predecessor)
    numbers: dict[object, int] = {}
    return [
        numbers.setdefault((automaton.accepting[state], min_lengths[state], max_lengths[state]), len(numbers))
        for state in range(len(automaton.transitions))
    ]


def _transitions_by_class(
    row: Sequence[tuple[Ranges, int]], classes: Sequence[int]
) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
    """Return the transitions (class of the target, characters), one per class."""
    ranges_by_class: dict[int, list[tuple[int, int]]] = {}
    for ranges, target in row:
        ranges_by_class.setdefault(classes[target], []).extend(ranges)
    return tuple((target, tuple(union(ranges))) for target, ranges in sorted(ranges_by_class.items()))
