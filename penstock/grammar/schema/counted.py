"""Automata up to a length: characters that repeat are counted in blocks, so that few rules are enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.grammar.schema.automata import Automaton
from penstock.grammar.schema.ebnf import NOTHING, Ranges, Rules, choice, repeated, sequence

MAX_COUNTED = 700  # rules
_MAX_FINE = 400  # rules, for blocks that are smaller than they need be
_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class _Place:
    """A state, and how many characters may still come."""

    state: int
    left: int
    is_mixed: bool = False  # whether it was entered by its own detour


class Counting:
    """Which places an automaton has up to a length.

    Where a character repeats, what is left is rounded down to whole blocks, unless no text would fit then.
    That leaves out some texts near the length.

    A *detour* leads from such a state back to it, as an escaped character does in a URI. Behind the first
    one, characters and detours count the same, so that not every one of them costs a block.
    """

    def __init__(self, automaton: Automaton, most: int, block: int) -> None:
        self.automaton = automaton
        self.most = most
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

    def entered(self, state: int, left: int, source: int | None = None) -> _Place | None:
        """The place; None where no text fits."""
        if left < self.shortest[state]:
            return None
        if self.loops[state] is None:
            return _Place(state, left)
        if left - left % self.block >= self.shortest[state]:
            left -= left % self.block
        return _Place(state, left, source is not None and source in self.detours.get(state, ([], []))[1])

    def exits(self, place: _Place, left: int) -> Iterator[tuple[Ranges, _Place]]:
        """The steps to other states."""
        first = self.detours[place.state][1][0] if place.is_mixed else None
        for ranges, target in self.automaton.steps[place.state]:
            if target in (place.state, first):
                continue
            if (entered := self.entered(target, left - 1, place.state)) is not None:
                yield ranges, entered

    def own(self, place: _Place) -> tuple[int, int, bool]:
        """How often a state's own character may come before another, and how many characters that takes.

        Also whether a whole block may come, and then the same place with less. The last characters, less
        than a block, are all spent where they are left.
        """
        if self.loops[place.state] is None:
            return 0, 0, False
        size = len(self.detours[place.state][0]) if place.is_mixed else 1
        if place.left - self.block >= self.shortest[place.state]:
            times = self.block // size - 1
            return times, times * size, True
        times = (place.left - self.shortest[place.state]) // size
        return times, times * size, False

    def less(self, place: _Place) -> _Place:
        """The place behind a whole block."""
        return _Place(place.state, place.left - self.block, place.is_mixed)

    def places(self, most: int) -> int:
        """How many places there are; it stops counting at ``most``."""
        seen = {self.start}
        pending = [self.start]
        while pending and len(seen) < most:
            place = pending.pop()
            _, spent, has_block = self.own(place)
            found = [entered for _, entered in self.exits(place, place.left - spent)]
            for one in [*found, self.less(place)] if has_block else found:
                if one not in seen:
                    seen.add(one)
                    pending.append(one)
        return len(seen)

    @property
    def start(self) -> _Place:
        """Where a text begins."""
        entered = self.entered(0, self.most)
        assert entered is not None
        return entered


def counting_of(automaton: Automaton, most: int) -> Counting | None:
    """The places of an automaton up to a length, at most `MAX_COUNTED` of them, with the smallest blocks.

    Returns None where there are more, or no text is as short as that.
    """
    if automaton.shortest[0] > most:
        return None
    block = 1
    while block <= max(most // _BLOCKS, 1):
        counting = Counting(automaton, most, block)
        if counting.places(_MAX_FINE + 1) <= _MAX_FINE:
            return counting
        block *= 2
    counting = Counting(automaton, most, max(most // _BLOCKS, 1))
    return counting if counting.places(MAX_COUNTED + 1) <= MAX_COUNTED else None


class CountedWriter:
    """Writes the rules of an automaton up to a length.

    Args:
        rules: where they are added.
        counting: the places.
        options: gives the ways to write one character.
        end: what follows where a text may end.
    """

    def __init__(
        self, rules: Rules, counting: Counting, options: Callable[[Ranges], list[str]], end: str
    ) -> None:
        self._rules = rules
        self._counting = counting
        self._options = options
        self._end = end
        self._names: dict[_Place, str] = {}
        self._pending: list[_Place] = []

    def write(self) -> str:
        """The first rule."""
        first = self._name(self._counting.start)
        while self._pending:
            place = self._pending.pop()
            self._rules.define(self._names[place], choice(self._body(place)))
        return first

    def _name(self, place: _Place) -> str:
        if place not in self._names:
            self._names[place] = self._rules.reserve("state")
            self._pending.append(place)
        return self._names[place]

    def _body(self, place: _Place) -> list[str]:
        times, spent, has_block = self._counting.own(place)
        exits = self._exits(place, place.left - spent)
        if times == 0 and not has_block:
            return exits
        # Fewer than a block and then something else, or a whole block: a text has one reading.
        own = self._own(place)
        some = self._rules.add("some", repeated(own, 0, times)) if times else NOTHING
        result = [sequence(some, choice(exits))] if exits else []
        if has_block:
            whole = self._rules.add("block", repeated(own, times + 1, times + 1))
            result.append(sequence(whole, self._name(self._counting.less(place))))
        return result

    def _own(self, place: _Place) -> str:
        loop = self._counting.loops[place.state]
        assert loop is not None
        options = self._options(loop)
        if place.is_mixed:
            read, _ = self._counting.detours[place.state]
            options = [*options, sequence(*(choice(self._options(ranges)) for ranges in read))]
        return choice(options)

    def _exits(self, place: _Place, left: int) -> list[str]:
        result = [self._end] if self._counting.automaton.accepting[place.state] else []
        for ranges, entered in self._counting.exits(place, left):
            result += [sequence(one, self._name(entered)) for one in self._options(ranges)]
        return result
