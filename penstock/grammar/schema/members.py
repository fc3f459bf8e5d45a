"""Writes the grammar of the members of an object, with their order and number."""

from __future__ import annotations

from penstock.grammar.schema.ebnf import EMPTY, EbnfRules, choice, repeated, sequence
from penstock.grammar.schema.shapes import Object


class Members:
    """Writes the members of an object: its named properties in order, then other properties.

    The grammar has at most one ``members`` rule per state. A state is the index of the next named property
    and the number of members so far. If members are not counted, the state only records whether there was a
    member before, because a comma must then precede the next member.
    """

    def __init__(
        self, rules: EbnfRules, shape: Object, names: list[str], counts_members: bool, comma: str, space: str
    ) -> None:
        self._rules = rules
        self._is_required = [name in shape.required for name in names]
        self._min_count = shape.min_count if counts_members else 0
        self._max_count = shape.max_count
        self._counts_members = counts_members
        self._comma = comma
        self._space = space  # white space before the closing brace of an object with members

    def write(self, pairs: list[str], other_member: str | None) -> str | None:
        """Return the expression of all members; None if the bounds cannot be satisfied.

        Args:
            pairs: the expression of each named property, in order.
            other_member: the expression of any other member; None if there must be no other members.
        """
        # Number of members so far -> expression of the following members.
        expressions: dict[int, str | None] = {}
        max_count = len(pairs) if self._counts_members else 1
        for count in range(max_count + 1):
            expressions[count] = self._other_members(other_member, count)
        for index in range(len(pairs) - 1, -1, -1):
            new_expressions: dict[int, str | None] = {}
            for count in range((index if self._counts_members else min(index, 1)) + 1):
                expression_after_member = expressions[count + 1 if self._counts_members else 1]
                options = []
                if expression_after_member is not None:
                    options.append(
                        sequence(self._comma if count else EMPTY, pairs[index], expression_after_member)
                    )
                expression_without_member = expressions[count]
                if not self._is_required[index] and expression_without_member is not None:
                    options.append(expression_without_member)
                new_expressions[count] = self._rules.add("members", choice(options)) if options else None
            expressions = new_expressions
        return expressions[0]

    def _other_members(self, other_member: str | None, count: int) -> str | None:
        """Return the expression after the last named property; None if the bounds cannot be satisfied.

        Args:
            other_member: the expression of any other member; None if there must be no other members.
            count: number of members so far; 0 or 1 if members are not counted.
        """
        min_count = max_count = None
        if self._counts_members:
            min_count = self._min_count - count
            max_count = None if self._max_count is None else self._max_count - count
        # Members that the schema does not name count as one member toward the minimum, because they can have
        # equal names.
        num_missing = max(min_count or 0, 0)
        if num_missing > (other_member is not None) or (max_count is not None and max_count < num_missing):
            return None
        if other_member is None or max_count == 0:
            return self._space if count else EMPTY
        further_member = sequence(self._comma, other_member)
        if count:
            return self._rules.add(
                "others", sequence(repeated(further_member, num_missing, max_count), self._space)
            )
        first_other = sequence(
            other_member,
            repeated(further_member, 0, None if max_count is None else max_count - 1),
            self._space,
        )
        return self._rules.add("others", first_other if num_missing else repeated(first_other, 0, 1))
