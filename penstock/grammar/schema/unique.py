"""Arrays with ``uniqueItems``: of few values, each at most once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import comb
from typing import Any

from penstock.errors import UnsupportedSchemaError
from penstock.grammar.schema.ebnf import NOTHING, Rules, choice, sequence
from penstock.grammar.schema.keywords import identity
from penstock.grammar.schema.shapes import Array, Conjunction, Literal, Numeric, Schemas

MAX_SUBSETS = 256  # of values that were written already
MAX_VALUES = 1000


def has_enough_items(schemas: Schemas, shape: Array) -> bool:
    """Whether an array can have its fewest items without repeating one."""
    if shape.least < 2:
        return True
    if shape.prefix:
        lists = [
            listed_values(schemas, shape.item(i)) for i in range(min(shape.least, len(shape.prefix) + 1))
        ]
        return any(one is None for one in lists) or _are_distinct(lists, shape.least)  # type: ignore[arg-type]
    values = listed_values(schemas, shape.items)
    return values is None or len(values) >= shape.least


def listed_values(schemas: Schemas, conjunction: Conjunction) -> list[Any] | None:
    """The values of a conjunction, each once; None where they are not listed and not few integers."""
    found: dict[Hashable, Any] = {}
    for shape in schemas.shapes(conjunction):
        if isinstance(shape, Literal):
            found.setdefault(identity(shape.value), shape.value)
        elif isinstance(shape, Numeric) and shape.is_integer:
            low, high = shape.bounds.integers()
            factor = shape.multiple_of
            if low is None or high is None or (high - low) // factor > MAX_VALUES:
                return None
            for value in range(-(-low // factor) * factor, high + 1, factor):
                found.setdefault(identity(value), value)
        else:
            return None
    return list(found.values())


class UniqueWriter:
    """Writes the items of arrays that have none twice.

    Few values come in any order. Of more values, each comes behind those that the schema lists before it: a
    rule for each set of values that were written would be too much.

    Args:
        rules: where rules are added.
        schemas: the document.
        write: writes one value.
        comma: what separates two items.
    """

    def __init__(self, rules: Rules, schemas: Schemas, write: Callable[[Any], str], comma: str) -> None:
        self._rules = rules
        self._schemas = schemas
        self._write = write
        self._comma = comma

    def items(self, shape: Array) -> str | None:
        """The items of an array, without what stands around them; None where the bounds let none be.

        Raises:
            UnsupportedSchemaError: the values are not listed, or are too many for an array with a prefix.
        """
        prefix = [self._values(shape, one) for one in shape.prefix[: shape.most]]
        rest = self._values(shape, shape.items) if shape.most is None or shape.most > len(prefix) else []
        most = len(prefix) + len(rest)
        most = most if shape.most is None else min(most, shape.most)
        if shape.least > most:
            return None
        if not prefix and sum(comb(len(rest), size) for size in range(most + 1)) > MAX_SUBSETS:
            return self._in_order(rest, shape.least, most)
        return _AnyOrder(self, shape, prefix, rest, most).write()

    def _values(self, shape: Array, conjunction: Conjunction) -> list[Any]:
        values = listed_values(self._schemas, conjunction)
        if values is None or len(values) > MAX_VALUES:
            raise self.refused(
                shape, f"only where the items are of enum, const, boolean, or at most {MAX_VALUES} integers"
            )
        return values

    def refused(self, shape: Array, reason: str) -> UnsupportedSchemaError:
        """The error of an array that cannot be written."""
        assert shape.unique_at is not None
        return UnsupportedSchemaError("uniqueItems", shape.unique_at.where, reason)

    def add(self, options: list[str]) -> str | None:
        """A rule of these options; None without any."""
        return self._rules.add("unique", choice(options)) if options else None

    def item(self, value: Any, is_first: bool) -> str:
        """A value, behind the comma that it needs."""
        return sequence(NOTHING if is_first else self._comma, self._rules.add("item", self._write(value)))

    def _in_order(self, values: list[Any], least: int, most: int) -> str | None:
        """Values in the order of the schema. Counted only where a bound can be missed."""
        highest = max(least, most if most < len(values) else 1)
        following: list[str | None] = [NOTHING if count >= least else None for count in range(highest + 1)]
        for value in reversed(values):
            before: list[str | None] = []
            for count in range(highest + 1):
                options = []
                can_add = count < most or most == len(values)
                if can_add and (after := following[min(count + 1, highest)]) is not None:
                    options.append(sequence(self.item(value, count == 0), after))
                if (skipped := following[count]) is not None:
                    options.append(skipped)
                before.append(self.add(options))
            following = before
        return following[0]


class _AnyOrder:
    """The items of one array, in any order; a rule for each set of values that were written."""

    def __init__(
        self, writer: UniqueWriter, shape: Array, prefix: list[list[Any]], rest: list[Any], most: int
    ) -> None:
        self._writer = writer
        self._shape = shape
        self._prefix = prefix
        self._rest = rest
        self._most = most
        self._known: dict[tuple[int, frozenset[Hashable]], str | None] = {}

    def write(self) -> str | None:
        """All items; None where there can be no array."""
        return self._after(0, frozenset())

    def _after(self, count: int, used: frozenset[Hashable]) -> str | None:
        """What may come behind so many items."""
        key = (count, used)
        if key not in self._known:
            if len(self._known) > 2 * MAX_SUBSETS:
                reason = f"with prefixItems, only up to {2 * MAX_SUBSETS} sets of items"
                raise self._writer.refused(self._shape, reason)
            self._known[key] = None
            options = [NOTHING] if count >= self._shape.least else []
            if count < self._most:
                values = self._prefix[count] if count < len(self._prefix) else self._rest
                for value in values:
                    name = identity(value)
                    if name not in used and (after := self._after(count + 1, used | {name})) is not None:
                        options.append(sequence(self._writer.item(value, count == 0), after))
            self._known[key] = self._writer.add(options)
        return self._known[key]


def _are_distinct(lists: list[list[Any]], least: int) -> bool:
    """Whether each item can be another value: one of its list, or of the last list behind that."""
    wanted = [*lists, *[lists[-1]] * (least - len(lists))]
    if least > sum(map(len, lists)):
        return False
    taken: dict[Hashable, int] = {}  # value -> the place that has it

    def place(index: int, seen: set[Hashable]) -> bool:
        for value in wanted[index]:
            name = identity(value)
            if name not in seen:
                seen.add(name)
                if name not in taken or place(taken[name], seen):
                    taken[name] = index
                    return True
        return False

    return all(place(index, set()) for index in range(least))
