"""Writes the members of an object as a grammar, with their order and number."""

from __future__ import annotations

from penstock.grammar.schema.ebnf import NOTHING, EbnfRules, choice, repeated, sequence
from penstock.grammar.schema.shapes import Object


class Members:
    """The members of an object: its named properties in order, required or optional, then others.

    The grammar is a chain of states. A state has the next property, whether a member came before (which needs
    a comma), and the number of members so far if their number is bounded.
    """

    def __init__(
        self, rules: EbnfRules, shape: Object, names: list[str], counted: bool, comma: str, space: str
    ) -> None:
        self._rules = rules
        self._required = [name in shape.required for name in names]
        self._min_count = shape.min_count if counted else 0
        self._max_count = shape.max_count
        self._counted = counted
        self._comma = comma
        self._space = space  # before the closing brace of an object with members

    def write(self, pairs: list[str], others: str | None) -> str | None:
        """Return the expression of all members; None if the bounds cannot be satisfied."""
        states: dict[int, str | None] = {}
        highest = len(pairs) if self._counted else 1
        for count in range(highest + 1):
            states[count] = self._others(others, count)
        for place in range(len(pairs) - 1, -1, -1):
            before: dict[int, str | None] = {}
            for count in range((place if self._counted else min(place, 1)) + 1):
                following = states[count + 1 if self._counted else 1]
                options = []
                if following is not None:
                    options.append(sequence(self._comma if count else NOTHING, pairs[place], following))
                skipped = states[count]
                if not self._required[place] and skipped is not None:
                    options.append(skipped)
                before[count] = self._rules.add("members", choice(options)) if options else None
            states = before
        return states[0]

    def _others(self, other: str | None, count: int) -> str | None:
        """Return the expression after the last named property, with ``count`` members so far."""
        min_count = max_count = None
        if self._counted:
            min_count = self._min_count - count
            max_count = None if self._max_count is None else self._max_count - count
        missing = max(
            min_count or 0, 0
        )  # only one other member counts, because further ones may repeat its name
        if missing > (other is not None) or (max_count is not None and max_count < missing):
            return None
        if other is None or max_count == 0:
            return self._space if count else NOTHING
        more = sequence(self._comma, other)
        if count:
            return self._rules.add("others", sequence(repeated(more, missing, max_count), self._space))
        first = sequence(other, repeated(more, 0, None if max_count is None else max_count - 1), self._space)
        return self._rules.add("others", first if missing else repeated(first, 0, 1))
