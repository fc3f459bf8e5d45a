"""Writes an automaton with a maximum length as a small number of grammar rules.

Repeated characters are counted in blocks. A rule subtracts a whole block of characters from the remaining
length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.grammar.schema.automata import Automaton
from penstock.grammar.schema.ebnf import EMPTY, EbnfRules, Ranges, choice, repeated, sequence

MAX_COUNTED_STATES = 700  # maximum number of counted states, each of which is a rule of the grammar
_MAX_SMALL_BLOCK_STATES = 400  # maximum number of counted states, unless blocks have the largest size
_NUM_BLOCKS = 16  # a block has at most 1/16 of the characters of the maximum length, but at least one


@dataclass(frozen=True, slots=True)
class _CountedState:
    """A state of the automaton and the maximum number of characters that may still follow."""

    state: int
    remaining: int
    is_after_detour: bool = False  # whether the text took the detour of the state (see `Counting`)


class Counting:
    """The counted states of an automaton for a maximum length.

    A state has a loop if characters lead from it to itself. At such a state, the remaining length is rounded
    down to a multiple of the block size, unless no text would then fit. This excludes some texts near the
    maximum length.

    A *detour* is a path from a state with a loop over other states back to the state with the loop, such as
    an escaped character in a URI. `detours` has at most one detour per state. A detour has no branches, at
    most 5 characters and at most one block of characters. After the first detour of a state, a repetition is
    one loop character or one detour, and both count as many characters as the detour has. If a detour were
    an ordinary transition instead, the remaining length would decrease by a block at every detour.
    """

    def __init__(self, automaton: Automaton, max_count: int, block_size: int) -> None:
        self.automaton = automaton
        self.max_count = max_count
        self.block_size = block_size
        self.min_lengths = automaton.min_lengths
        self.loops: list[Ranges | None] = [
            next((ranges for ranges, target in row if target == state), None)
            for state, row in enumerate(automaton.transitions)
        ]
        # State with a loop -> (characters of each transition of its detour, states of the detour).
        self.detours: dict[int, tuple[list[Ranges], list[int]]] = {}
        for state, loop in enumerate(self.loops):
            if loop is not None and block_size > 1:
                self._find_detour(state)

    def _find_detour(self, state: int) -> None:
        for ranges, target in self.automaton.transitions[state]:
            detour_ranges, path = [ranges], [target]
            while len(detour_ranges) <= 4 and self._has_one_exit(path[-1]):
                ((ranges, target),) = self.automaton.transitions[path[-1]]
                detour_ranges.append(ranges)
                if target == state and len(detour_ranges) <= self.block_size:
                    self.detours[state] = (detour_ranges, path)
                    return
                path.append(target)

    def _has_one_exit(self, state: int) -> bool:
        return not self.automaton.accepting[state] and len(self.automaton.transitions[state]) == 1

    def make_counted_state(
        self, state: int, remaining: int, source: int | None = None
    ) -> _CountedState | None:
        """Return the counted state of a state; None if no text fits into the remaining length.

        ``source`` is the state before the transition.
        """
        if remaining < self.min_lengths[state]:
            return None
        if self.loops[state] is None:
            return _CountedState(state, remaining)
        if remaining - remaining % self.block_size >= self.min_lengths[state]:
            remaining -= remaining % self.block_size
        return _CountedState(
            state, remaining, source is not None and source in self.detours.get(state, ([], []))[1]
        )

    def exits(self, counted_state: _CountedState, remaining: int) -> Iterator[tuple[Ranges, _CountedState]]:
        """Yield (characters, counted state) for each transition to another state.

        After the first detour, the transition into the detour is left out.
        """
        detour_state = self.detours[counted_state.state][1][0] if counted_state.is_after_detour else None
        for ranges, target in self.automaton.transitions[counted_state.state]:
            if target in (counted_state.state, detour_state):
                continue
            if (
                next_state := self.make_counted_state(target, remaining - 1, counted_state.state)
            ) is not None:
                yield ranges, next_state

    def self_loops(self, counted_state: _CountedState) -> tuple[int, int, bool]:
        """Return (maximum repetitions, characters that they count as, whether a whole block fits) of a loop.

        A state without a loop has (0, 0, False).

        The repetitions precede a transition to another state. They are fewer than a block. The transition
        subtracts the characters of the maximum repetitions, even if a text has fewer repetitions.
        """
        if self.loops[counted_state.state] is None:
            return 0, 0, False
        characters_per_repetition = (
            len(self.detours[counted_state.state][0]) if counted_state.is_after_detour else 1
        )
        if counted_state.remaining - self.block_size >= self.min_lengths[counted_state.state]:
            repetitions = self.block_size // characters_per_repetition - 1
            return repetitions, repetitions * characters_per_repetition, True
        repetitions = (
            counted_state.remaining - self.min_lengths[counted_state.state]
        ) // characters_per_repetition
        return repetitions, repetitions * characters_per_repetition, False

    def counted_state_after_block(self, counted_state: _CountedState) -> _CountedState:
        """Return the counted state after a whole block of repetitions."""
        return _CountedState(
            counted_state.state, counted_state.remaining - self.block_size, counted_state.is_after_detour
        )

    def num_states(self, max_states: int) -> int:
        """Return the number of counted states. Counting stops at about ``max_states``."""
        seen = {self.start}
        pending = [self.start]
        while pending and len(seen) < max_states:
            counted_state = pending.pop()
            _, num_characters, has_block = self.self_loops(counted_state)
            successors = [
                next_state
                for _, next_state in self.exits(counted_state, counted_state.remaining - num_characters)
            ]
            for successor in (
                [*successors, self.counted_state_after_block(counted_state)] if has_block else successors
            ):
                if successor not in seen:
                    seen.add(successor)
                    pending.append(successor)
        return len(seen)

    @property
    def start(self) -> _CountedState:
        """The start state."""
        next_state = self.make_counted_state(0, self.max_count)
        assert next_state is not None
        return next_state


def make_counting(automaton: Automaton, max_count: int) -> Counting | None:
    """Return the counted states of an automaton for a maximum length of ``max_count`` characters.

    The block size is the smallest power of two that results in at most `_MAX_SMALL_BLOCK_STATES` states, or
    else the largest block size.

    Returns None if even the largest blocks result in more than `MAX_COUNTED_STATES` states, or if no text is
    short enough.
    """
    if automaton.min_lengths[0] > max_count:
        return None
    block_size = 1
    while block_size <= max(max_count // _NUM_BLOCKS, 1):
        counting = Counting(automaton, max_count, block_size)
        if counting.num_states(_MAX_SMALL_BLOCK_STATES + 1) <= _MAX_SMALL_BLOCK_STATES:
            return counting
        block_size *= 2
    counting = Counting(automaton, max_count, max(max_count // _NUM_BLOCKS, 1))
    return counting if counting.num_states(MAX_COUNTED_STATES + 1) <= MAX_COUNTED_STATES else None


class CountedWriter:
    """Writes the rules of an automaton with a maximum length.

    Args:
        rules: receives the new rules.
        counting: the counted states.
        options: returns the expressions that match one character of given ranges, plain or escaped.
        end: the expression that follows the text, such as the closing quote.
    """

    def __init__(
        self, rules: EbnfRules, counting: Counting, options: Callable[[Ranges], list[str]], end: str
    ) -> None:
        self._rules = rules
        self._counting = counting
        self._options = options
        self._end = end
        self._names: dict[_CountedState, str] = {}
        self._pending_states: list[_CountedState] = []

    def write(self) -> str:
        """Write all rules. Return the name of the start rule."""
        start_name = self._name(self._counting.start)
        while self._pending_states:
            counted_state = self._pending_states.pop()
            self._rules.define(self._names[counted_state], choice(self._body(counted_state)))
        return start_name

    def _name(self, counted_state: _CountedState) -> str:
        if counted_state not in self._names:
            self._names[counted_state] = self._rules.reserve("state")
            self._pending_states.append(counted_state)
        return self._names[counted_state]

    def _body(self, counted_state: _CountedState) -> list[str]:
        repetitions, num_characters, has_block = self._counting.self_loops(counted_state)
        exits = self._write_exits(counted_state, counted_state.remaining - num_characters)
        if repetitions == 0 and not has_block:
            return exits
        # The text has either fewer repetitions than a block and then a transition, or a whole block. Each
        # text therefore has exactly one derivation.
        self_loops = self._write_self_loops(counted_state)
        partial_block = (
            self._rules.add("some", repeated(self_loops, 0, repetitions)) if repetitions else EMPTY
        )
        result = [sequence(partial_block, choice(exits))] if exits else []
        if has_block:
            whole_block = self._rules.add("block", repeated(self_loops, repetitions + 1, repetitions + 1))
            result.append(
                sequence(whole_block, self._name(self._counting.counted_state_after_block(counted_state)))
            )
        return result

    def _write_self_loops(self, counted_state: _CountedState) -> str:
        loop = self._counting.loops[counted_state.state]
        assert loop is not None
        options = self._options(loop)
        if counted_state.is_after_detour:
            detour_ranges, _ = self._counting.detours[counted_state.state]
            options = [*options, sequence(*(choice(self._options(ranges)) for ranges in detour_ranges))]
        return choice(options)

    def _write_exits(self, counted_state: _CountedState, remaining: int) -> list[str]:
        result = [self._end] if self._counting.automaton.accepting[counted_state.state] else []
        for ranges, next_state in self._counting.exits(counted_state, remaining):
            result += [sequence(option, self._name(next_state)) for option in self._options(ranges)]
        return result
