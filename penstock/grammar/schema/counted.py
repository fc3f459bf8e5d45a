"""Automata with a maximum length. Repeated characters are counted in blocks, which needs few rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.grammar.schema.automata import Automaton
from penstock.grammar.schema.ebnf import NOTHING, EbnfRules, Ranges, choice, repeated, sequence

MAX_COUNTED = 700  # rules
_MAX_FINE = 400  # maximum number of rules spent on smaller blocks
_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class _CountedState:
    """A state of the automaton with the maximum number of characters that may still follow."""

    state: int
    remaining: int
    after_detour: bool = False  # whether the path to it was a detour from the same state


class Counting:
    """The counted states of an automaton up to a length.

    At a repeated character, the remaining length is rounded down to whole blocks, unless no text would fit
    then. This excludes some texts near the maximum length.

    A *detour* leads from a state with a repeated character back to it, such as an escaped character in a URI.
    After the first detour, a detour counts as one character, so that not every detour costs a block.
    """

    def __init__(self, automaton: Automaton, max_count: int, block: int) -> None:
        self.automaton = automaton
        self.max_count = max_count
        self.block = block
        self.shortest = automaton.shortest
        self.loops: list[Ranges | None] = [
            next((ranges for ranges, target in row if target == state), None)
            for state, row in enumerate(automaton.steps)
        ]
        self.detours: dict[int, tuple[list[Ranges], list[int]]] = {}
        for state, loop in enumerate(self.loops):
            if loop is not None and block > 1:
                self._find_detour(state)

    def _find_detour(self, state: int) -> None:
        for ranges, target in self.automaton.steps[state]:
            read, passed = [ranges], [target]
            while len(read) <= 4 and self._is_passage(passed[-1]):
                ((ranges, target),) = self.automaton.steps[passed[-1]]
                read.append(ranges)
                if target == state and len(read) <= self.block:
                    self.detours[state] = (read, passed)
                    return
                passed.append(target)

    def _is_passage(self, state: int) -> bool:
        return not self.automaton.accepting[state] and len(self.automaton.steps[state]) == 1

    def enter(self, state: int, remaining: int, source: int | None = None) -> _CountedState | None:
        """Return the counted state; None if no text fits."""
        if remaining < self.shortest[state]:
            return None
        if self.loops[state] is None:
            return _CountedState(state, remaining)
        if remaining - remaining % self.block >= self.shortest[state]:
            remaining -= remaining % self.block
        return _CountedState(
            state, remaining, source is not None and source in self.detours.get(state, ([], []))[1]
        )

    def exits(self, counted: _CountedState, remaining: int) -> Iterator[tuple[Ranges, _CountedState]]:
        """Yield the transitions to other states."""
        first = self.detours[counted.state][1][0] if counted.after_detour else None
        for ranges, target in self.automaton.steps[counted.state]:
            if target in (counted.state, first):
                continue
            if (enter := self.enter(target, remaining - 1, counted.state)) is not None:
                yield ranges, enter

    def self_loops(self, counted: _CountedState) -> tuple[int, int, bool]:
        """Return (repetitions, characters per repetition, whether a whole block fits) of a state's loop.

        Up to that many repetitions, fewer than a block, come before another character. The transitions to
        other states count all of them, even if a text has fewer.
        """
        if self.loops[counted.state] is None:
            return 0, 0, False
        size = len(self.detours[counted.state][0]) if counted.after_detour else 1
        if counted.remaining - self.block >= self.shortest[counted.state]:
            times = self.block // size - 1
            return times, times * size, True
        times = (counted.remaining - self.shortest[counted.state]) // size
        return times, times * size, False

    def after_block(self, counted: _CountedState) -> _CountedState:
        """Return the counted state after a whole block."""
        return _CountedState(counted.state, counted.remaining - self.block, counted.after_detour)

    def num_states(self, max_count: int) -> int:
        """Return the number of counted states; stops counting at ``max_count``."""
        seen = {self.start}
        pending = [self.start]
        while pending and len(seen) < max_count:
            counted = pending.pop()
            _, spent, has_block = self.self_loops(counted)
            found = [enter for _, enter in self.exits(counted, counted.remaining - spent)]
            for one in [*found, self.after_block(counted)] if has_block else found:
                if one not in seen:
                    seen.add(one)
                    pending.append(one)
        return len(seen)

    @property
    def start(self) -> _CountedState:
        """The start state."""
        enter = self.enter(0, self.max_count)
        assert enter is not None
        return enter


def counting_of(automaton: Automaton, max_count: int) -> Counting | None:
    """Return the counted states of an automaton up to a length, with the smallest possible blocks.

    Returns None if there are more than `MAX_COUNTED`, or if no text is short enough.
    """
    if automaton.shortest[0] > max_count:
        return None
    block = 1
    while block <= max(max_count // _BLOCKS, 1):
        counting = Counting(automaton, max_count, block)
        if counting.num_states(_MAX_FINE + 1) <= _MAX_FINE:
            return counting
        block *= 2
    counting = Counting(automaton, max_count, max(max_count // _BLOCKS, 1))
    return counting if counting.num_states(MAX_COUNTED + 1) <= MAX_COUNTED else None


class CountedWriter:
    """Writes the rules of an automaton up to a length.

    Args:
        rules: receives the new rules.
        counting: the counted states.
        options: returns the spellings of one character.
        end: the expression after the end of a text.
    """

    def __init__(
        self, rules: EbnfRules, counting: Counting, options: Callable[[Ranges], list[str]], end: str
    ) -> None:
        self._rules = rules
        self._counting = counting
        self._options = options
        self._end = end
        self._names: dict[_CountedState, str] = {}
        self._pending: list[_CountedState] = []

    def write(self) -> str:
        """Return the start rule."""
        first = self._name(self._counting.start)
        while self._pending:
            counted = self._pending.pop()
            self._rules.define(self._names[counted], choice(self._body(counted)))
        return first

    def _name(self, counted: _CountedState) -> str:
        if counted not in self._names:
            self._names[counted] = self._rules.reserve("state")
            self._pending.append(counted)
        return self._names[counted]

    def _body(self, counted: _CountedState) -> list[str]:
        times, spent, has_block = self._counting.self_loops(counted)
        exits = self._write_exits(counted, counted.remaining - spent)
        if times == 0 and not has_block:
            return exits
        # Fewer than a block and then another character, or a whole block: each text has one derivation.
        self_loops = self._write_self_loops(counted)
        some = self._rules.add("some", repeated(self_loops, 0, times)) if times else NOTHING
        result = [sequence(some, choice(exits))] if exits else []
        if has_block:
            whole = self._rules.add("block", repeated(self_loops, times + 1, times + 1))
            result.append(sequence(whole, self._name(self._counting.after_block(counted))))
        return result

    def _write_self_loops(self, counted: _CountedState) -> str:
        loop = self._counting.loops[counted.state]
        assert loop is not None
        options = self._options(loop)
        if counted.after_detour:
            read, _ = self._counting.detours[counted.state]
            options = [*options, sequence(*(choice(self._options(ranges)) for ranges in read))]
        return choice(options)

    def _write_exits(self, counted: _CountedState, remaining: int) -> list[str]:
        result = [self._end] if self._counting.automaton.accepting[counted.state] else []
        for ranges, enter in self._counting.exits(counted, remaining):
            result += [sequence(one, self._name(enter)) for one in self._options(ranges)]
        return result
