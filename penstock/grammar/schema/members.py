"""The members of an object as a grammar: which may follow which, and how many there may be."""

from __future__ import annotations

from penstock.grammar.schema.ebnf import NOTHING, Rules, choice, repeated, sequence
from penstock.grammar.schema.shapes import Object


class Members:
    """The members of an object: its named properties in order, each there or not, then others.

    The grammar is a chain of states: which property comes next, whether one came before (then a comma is
    due), and how many did where their number is bounded.
    """

    def __init__(
        self, rules: Rules, shape: Object, names: list[str], counted: bool, comma: str, space: str
    ) -> None:
        self._rules = rules
        self._required = [name in shape.required for name in names]
        self._least = shape.least if counted else 0
        self._most = shape.most
        self._counted = counted
        self._comma = comma
        self._space = space  # before the closing brace, where there are members

    def write(self, pairs: list[str], others: str | None) -> str | None:
        """All members; None where the bounds let none be written."""
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
        """What follows the last named property when ``count`` came before."""
        least = most = None
        if self._counted:
            least = self._least - count
            most = None if self._most is None else self._most - count
        missing = max(least or 0, 0)  # one other makes up for one, as more may repeat its name
        if missing > (other is not None) or (most is not None and most < missing):
            return None
        if other is None or most == 0:
            return self._space if count else NOTHING
        more = sequence(self._comma, other)
        if count:
            return self._rules.add("others", sequence(repeated(more, missing, most), self._space))
        first = sequence(other, repeated(more, 0, None if most is None else most - 1), self._space)
        return self._rules.add("others", first if missing else repeated(first, 0, 1))
