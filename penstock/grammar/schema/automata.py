"""Automata of strings that satisfy several conditions: expressions, excluded expressions and a length.

States are built from partial derivatives: a position is the unmatched rest of the expression, and a state is
the set of positions that a text can reach. Repetitions are expanded lazily, so bounds such as {0,100000} cost
nothing until they are reached.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.grammar.schema import regex
from penstock.grammar.schema.ebnf import Ranges, union

MAX_STATES = 400
_MAX_FOUND = 2000  # maximum states before minimisation
_MAX_POSITIONS = 4000  # maximum positions of one state, and steps to find them
_MAX_WORK = 300_000  # maximum character ranges and positions visited for one expression

_END = 0  # the position after the whole expression
_Row: TypeAlias = list[tuple[int, int, frozenset[int]]]  # first and last character, next positions
_State: TypeAlias = tuple[tuple[frozenset[int], ...], int]  # positions of each expression; characters counted


class TooLargeError(Exception):
    """An automaton has more states than `MAX_STATES`."""


@dataclass(slots=True)
class Automaton:
    """A deterministic automaton. The first state is the start."""

    steps: list[list[tuple[Ranges, int]]] = field(default_factory=list)
    accepting: list[bool] = field(default_factory=list)

    @property
    def shortest(self) -> list[int]:
        """Minimum number of characters from each state to an end."""
        sources = _sources(self)
        fewest = [0 if is_end else -1 for is_end in self.accepting]
        pending = [state for state, is_end in enumerate(self.accepting) if is_end]
        for state in pending:
            for source in sources[state]:
                if fewest[source] < 0:
                    fewest[source] = fewest[state] + 1
                    pending.append(source)
        return fewest


@dataclass(frozen=True, slots=True)
class Bound:
    """Minimum and maximum number of characters; None means no maximum."""

    min_count: int = 0
    max_count: int | None = None


def intersection(
    wanted: Sequence[regex.RegexNode],
    excluded: Sequence[regex.RegexNode],
    bound: Bound,
) -> Automaton | None:
    """Return the minimal automaton of texts that match all of ``wanted`` and none of ``excluded``.

    Returns None if there is no such text.

    Raises:
        TooLargeError: the automaton has more than `MAX_STATES` states.
    """
    product = _Product(wanted, excluded, bound)
    start = product.start
    numbers = {start: 0}
    states = [start]
    steps: list[list[tuple[Ranges, int]]] = []
    for state in states:
        found: dict[_State, list[tuple[int, int]]] = {}
        for ranges, target in product.steps(state):
            found.setdefault(target, []).extend(ranges)
        row: list[tuple[Ranges, int]] = []
        for target, ranges in found.items():
            if target not in numbers:
                numbers[target] = len(states)
                states.append(target)
                if len(states) > _MAX_FOUND:
                    raise TooLargeError
            row.append((union(ranges), numbers[target]))
        steps.append(row)
    result = _minimal(_live(Automaton(steps, [product.accepts(state) for state in states])))
    if result is not None and len(result.steps) > MAX_STATES:
        raise TooLargeError
    return result


class _Positions:
    """The positions of one expression."""

    def __init__(self, tree: regex.RegexNode) -> None:
        self._nodes: dict[object, regex.RegexNode] = {}  # shares equal parts of the tree
        self._numbers: dict[tuple[int, int], int] = {}
        self._made: list[tuple[regex.RegexNode, int] | None] = [None]
        self._lengths: list[tuple[int, int | None]] = [(0, 0)]
        self._steps: dict[int, tuple[bool, list[tuple[Ranges, int]]]] = {}
        self._rows: dict[frozenset[int], _Row] = {}
        self._work = 0
        self._measured: dict[int, tuple[int, int | None]] = {}  # id of a node -> its lengths
        self.start = frozenset({self._position_of(self._shared(tree), _END)})

    def shortest(self, positions: frozenset[int]) -> int:
        """Return the minimum number of characters that follow."""
        return min(self._lengths[position][0] for position in positions)

    def longest(self, positions: frozenset[int]) -> int | None:
        """Return the maximum number of characters that follow; None if unbounded."""
        highs = [self._lengths[position][1] for position in positions]
        return None if None in highs else max((high or 0 for high in highs), default=0)

    def can_end(self, positions: frozenset[int]) -> bool:
        """Return whether a text may end here."""
        return any(self._step(position)[0] for position in positions)

    def row(self, positions: frozenset[int]) -> _Row:
        """Return the transitions in the order of the characters."""
        if positions not in self._rows:
            self._rows[positions] = self._new_row(positions)
        return self._rows[positions]

    def _new_row(self, positions: frozenset[int]) -> _Row:
        events: list[
            tuple[int, int, int]
        ] = []  # a range boundary, and the position that begins or ends there
        for position in positions:
            for ranges, rest in self._step(position)[1]:
                for low, high in ranges:
                    events += [(low, 1, rest), (high + 1, -1, rest)]
        self._count(len(events))
        result: _Row = []
        active: Counter[int] = Counter()
        start = 0
        for border, group in itertools.groupby(sorted(events), key=lambda event: event[0]):
            if active:
                self._count(len(active))
                result.append((start, border - 1, frozenset(active)))
            for _, change, rest in group:
                active[rest] += change
                if not active[rest]:
                    del active[rest]
            start = border
        return result

    def _step(self, position: int) -> tuple[bool, list[tuple[Ranges, int]]]:
        """Return whether the text may end at a position, and its transitions."""
        if position not in self._steps:
            self._steps[position] = self._followed(position)
        return self._steps[position]

    def _followed(self, position: int) -> tuple[bool, list[tuple[Ranges, int]]]:
        can_end = False
        found: list[tuple[Ranges, int]] = []
        pending, seen = [position], set()
        while pending:
            one = pending.pop()
            if one in seen:
                continue
            seen.add(one)
            self._count(1)
            if len(seen) > _MAX_POSITIONS:
                raise TooLargeError
            made = self._made[one]
            if made is None:
                can_end = True
                continue
            node, rest = made
            if isinstance(node, regex.Char):
                found.append((node.ranges, rest))
            elif isinstance(node, regex.RegexSeq):
                for part in reversed(node.parts):
                    rest = self._position_of(part, rest)
                pending.append(rest)
            elif isinstance(node, regex.RegexAlt):
                pending += [self._position_of(option, rest) for option in node.options]
            else:
                assert isinstance(node, regex.RegexRepeat)
                if node.min_count == 0:
                    pending.append(rest)
                if node.max_count != 0:
                    max_count = None if node.max_count is None else node.max_count - 1
                    again = self._repeat(node.part, max(node.min_count - 1, 0), max_count)
                    pending.append(self._position_of(node.part, self._position_of(again, rest)))
        return can_end, found

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > _MAX_WORK:
            raise TooLargeError

    def _position_of(self, node: regex.RegexNode, rest: int) -> int:
        """Return the position for ``node`` followed by position ``rest``."""
        key = (id(node), rest)
        if key not in self._numbers:
            if id(node) not in self._measured:
                self._measured[id(node)] = regex.lengths(node)
            low, high = self._measured[id(node)]
            after, after_high = self._lengths[rest]
            self._numbers[key] = len(self._made)
            self._made.append((node, rest))
            self._lengths.append(
                (low + after, None if high is None or after_high is None else high + after_high)
            )
        return self._numbers[key]

    def _repeat(self, part: regex.RegexNode, min_count: int, max_count: int | None) -> regex.RegexNode:
        return self._nodes.setdefault(
            (regex.RegexRepeat, id(part), min_count, max_count), regex.RegexRepeat(part, min_count, max_count)
        )

    def _shared(self, node: regex.RegexNode) -> regex.RegexNode:
        """Return the tree with equal parts as one object, so that positions compare by identity."""
        if isinstance(node, regex.RegexRepeat):
            return self._repeat(self._shared(node.part), node.min_count, node.max_count)
        if isinstance(node, regex.RegexSeq):
            parts = tuple(map(self._shared, node.parts))
            return self._nodes.setdefault((regex.RegexSeq, *map(id, parts)), regex.RegexSeq(parts))
        if isinstance(node, regex.RegexAlt):
            options = tuple(map(self._shared, node.options))
            return self._nodes.setdefault((regex.RegexAlt, *map(id, options)), regex.RegexAlt(options))
        return self._nodes.setdefault(node, node)


class _Product:
    """The product automaton of several expressions and a character count."""

    def __init__(
        self, wanted: Sequence[regex.RegexNode], excluded: Sequence[regex.RegexNode], bound: Bound
    ) -> None:
        self._all = [_Positions(tree) for tree in (*wanted, *excluded)]
        self._wanted = self._all[: len(wanted)]
        self._bound = bound
        self.start = self._normalized(tuple(one.start for one in self._all), 0)

    def accepts(self, state: _State) -> bool:
        """Return whether a text may end here."""
        sets, count = state
        if 0 <= count < self._bound.min_count:
            return False
        ends = [one.can_end(positions) for one, positions in zip(self._all, sets, strict=True)]
        split = len(self._wanted)
        return all(ends[:split]) and not any(ends[split:])

    def steps(self, state: _State) -> Iterator[tuple[Ranges, _State]]:
        """Yield (characters, next state)."""
        sets, count = state
        if self._bound.max_count is not None and count >= self._bound.max_count:
            return
        rows = [one.row(positions) for one, positions in zip(self._all, sets, strict=True)]
        for low, high, target in _merged_rows(rows, len(self._wanted)):
            if self._is_short(target, count + 1):
                yield ((low, high),), self._normalized(target, count + 1 if count >= 0 else -1)

    def _is_short(self, sets: tuple[frozenset[int], ...], count: int) -> bool:
        """Return whether a text may still end within the maximum length."""
        if self._bound.max_count is None or count <= 0:
            return True
        left = self._bound.max_count - count
        return all(
            one.shortest(positions) <= left for one, positions in zip(self._wanted, sets, strict=False)
        )

    def _normalized(self, sets: tuple[frozenset[int], ...], count: int) -> _State:
        """Return the state. Its count becomes -1 if the length can no longer violate a bound."""
        min_count, max_count = self._bound.min_count, self._bound.max_count
        if count >= 0 and max_count is not None:
            longest = [one.longest(positions) for one, positions in zip(self._wanted, sets, strict=False)]
            is_safe = any(high is not None and count + high <= max_count for high in longest)
        else:
            is_safe = max_count is None or count < 0
        if count < 0 or (is_safe and count >= min_count):
            return sets, -1
        return sets, min(count, min_count) if is_safe else count


def _merged_rows(
    rows: Sequence[_Row], num_wanted: int
) -> Iterator[tuple[int, int, tuple[frozenset[int], ...]]]:
    """Yield the characters that every wanted expression accepts, with the next positions of all."""
    events: list[tuple[int, int, frozenset[int]]] = []
    for index, row in enumerate(rows):
        for low, high, target in row:
            events += [(low, index, target), (high + 1, index, frozenset())]
    if num_wanted == 0:
        events += [(border, -1, frozenset()) for border in (0, 0xD800, 0xE000, 0x110000)]
    targets = [frozenset[int]()] * len(rows)
    start = 0
    # At a boundary, the end of one range comes before the start of another.
    events.sort(key=lambda event: (event[0], bool(event[2])))
    for border, group in itertools.groupby(events, key=lambda event: event[0]):
        is_character = start < border <= 0x110000 and start != 0xD800
        if is_character and all(targets[:num_wanted]):
            yield start, border - 1, tuple(targets)
        for _, index, target in group:
            if index >= 0:
                targets[index] = target
        start = border


def _live(automaton: Automaton) -> Automaton | None:
    """Return the automaton without states that cannot reach an end."""
    sources = _sources(automaton)
    pending = [state for state, is_end in enumerate(automaton.accepting) if is_end]
    live = set(pending)
    while pending:
        for source in sources[pending.pop()]:
            if source not in live:
                live.add(source)
                pending.append(source)
    if 0 not in live:
        return None
    numbers = {state: number for number, state in enumerate(sorted(live))}
    steps = [
        [(ranges, numbers[target]) for ranges, target in automaton.steps[state] if target in live]
        for state in numbers
    ]
    return Automaton(steps, [automaton.accepting[state] for state in numbers])


def _minimal(automaton: Automaton | None) -> Automaton | None:
    """Return the minimal automaton (Moore's partition refinement)."""
    if automaton is None:
        return None
    classes = _by_distance(automaton)
    count = 0
    while len(set(classes)) > count:
        count = len(set(classes))
        keys: dict[object, int] = {}
        classes = [
            keys.setdefault((classes[state], _merged(row, classes)), len(keys))
            for state, row in enumerate(automaton.steps)
        ]
    # Numbered by first appearance, so the class of state 0 is 0.
    steps: list[list[tuple[Ranges, int]]] = [[] for _ in range(count)]
    accepting = [False] * count
    for state, one in enumerate(classes):
        accepting[one] = automaton.accepting[state]
        steps[one] = [(ranges, target) for target, ranges in _merged(automaton.steps[state], classes)]
    return Automaton(steps, accepting)


def _sources(automaton: Automaton) -> list[list[int]]:
    """Return the predecessors of each state."""
    sources: list[list[int]] = [[] for _ in automaton.steps]
    for state, row in enumerate(automaton.steps):
        for _, target in row:
            sources[target].append(state)
    return sources


def _by_distance(automaton: Automaton) -> list[int]:
    """Return classes of states by the minimum and maximum number of characters that follow.

    Equivalent states are in the same class. Starting from these classes saves one refinement round per
    character of the longest text.
    """
    sources = _sources(automaton)
    fewest = automaton.shortest
    max_count = [-1] * len(automaton.steps)  # -1 if the length is unbounded
    missing = [len(row) for row in automaton.steps]
    pending = [state for state, left in enumerate(missing) if not left]
    for state in pending:
        max_count[state] = max((max_count[target] + 1 for _, target in automaton.steps[state]), default=0)
        for source in sources[state]:
            missing[source] -= 1
            if not missing[source]:
                pending.append(source)
    keys: dict[object, int] = {}
    return [
        keys.setdefault((automaton.accepting[state], fewest[state], max_count[state]), len(keys))
        for state in range(len(automaton.steps))
    ]


def _merged(
    row: Sequence[tuple[Ranges, int]], classes: Sequence[int]
) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
    """Return the transitions grouped by the class of their target."""
    found: dict[int, list[tuple[int, int]]] = {}
    for ranges, target in row:
        found.setdefault(classes[target], []).extend(ranges)
    return tuple((target, tuple(union(ranges))) for target, ranges in sorted(found.items()))
