"""Writes arrays with ``uniqueItems``. Their items must have a limited number of possible values."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import comb

from penstock.errors import UnsupportedSchemaError
from penstock.grammar.schema.ebnf import EMPTY, EbnfRules, choice, sequence
from penstock.grammar.schema.keywords import equality_key
from penstock.grammar.schema.shapes import Array, Conjunction, Literal, Numeric, Schemas

MAX_SUBSETS = 256  # maximum number of sets of used values in an array without a prefix; each set is a rule
MAX_VALUES = 1000  # maximum number of possible values of an item


def has_enough_items(schemas: Schemas, shape: Array) -> bool:
    """Return whether an array can have its minimum number of distinct items.

    Returns True if `listed_values` cannot list the values of an item.
    """
    if shape.min_count < 2:
        return True
    if shape.prefix:
        value_lists = [
            listed_values(schemas, shape.item(i)) for i in range(min(shape.min_count, len(shape.prefix) + 1))
        ]
        return any(list_ is None for list_ in value_lists) or _can_be_distinct(value_lists, shape.min_count)  # type: ignore[arg-type]
    values = listed_values(schemas, shape.items)
    return values is None or len(values) >= shape.min_count


def listed_values(schemas: Schemas, conjunction: Conjunction) -> list[object] | None:
    """Return the distinct values of a conjunction: listed values, and integers between two bounds.

    Returns None if the conjunction allows any other values, or if the bounds of integers are more than
    `MAX_VALUES` steps of ``multipleOf`` apart.
    """
    values_by_key: dict[Hashable, object] = {}
    for shape in schemas.shapes(conjunction):
        if isinstance(shape, Literal):
            values_by_key.setdefault(equality_key(shape.value), shape.value)
        elif isinstance(shape, Numeric) and shape.is_integer:
            low, high = shape.bounds.integers()
            factor = shape.multiple_of
            if low is None or high is None or (high - low) // factor > MAX_VALUES:
                return None
            for value in range(-(-low // factor) * factor, high + 1, factor):
                values_by_key.setdefault(equality_key(value), value)
        else:
            return None
    return list(values_by_key.values())


class UniqueWriter:
    """Writes the grammars of arrays with unique items.

    A grammar for items in any order has one rule per set of used values. If an array without a prefix would
    need more than `MAX_SUBSETS` rules, the values must come in the order of the schema.

    Args:
        rules: receives the new rules.
        schemas: reads nested schemas.
        write: returns the expression of one value.
        comma: the expression between two items.
    """

    def __init__(
        self, rules: EbnfRules, schemas: Schemas, write: Callable[[object], str], comma: str
    ) -> None:
        self._rules = rules
        self._schemas = schemas
        self._write = write
        self._comma = comma

    def items(self, shape: Array) -> str | None:
        """Return the expression of the items, without brackets; None if no array is possible.

        Raises:
            UnsupportedSchemaError: `listed_values` cannot list the values of an item, an item has more than
                `MAX_VALUES` values, or an array with a prefix has too many sets of items.
        """
        prefix_values = [self._values(shape, conjunction) for conjunction in shape.prefix[: shape.max_count]]
        further_values = (
            self._values(shape, shape.items)
            if shape.max_count is None or shape.max_count > len(prefix_values)
            else []
        )
        max_count = len(prefix_values) + len(further_values)
        max_count = max_count if shape.max_count is None else min(max_count, shape.max_count)
        if shape.min_count > max_count:
            return None
        num_subsets = sum(comb(len(further_values), num_items) for num_items in range(max_count + 1))
        if not prefix_values and num_subsets > MAX_SUBSETS:
            return self._items_in_order(further_values, shape.min_count, max_count)
        return _AnyOrderWriter(self, shape, prefix_values, further_values, max_count).write()

    def _values(self, shape: Array, conjunction: Conjunction) -> list[object]:
        values = listed_values(self._schemas, conjunction)
        if values is None or len(values) > MAX_VALUES:
            raise self.unsupported_error(
                shape, f"only for items with enum, const, boolean, or at most {MAX_VALUES} integers"
            )
        return values

    def unsupported_error(self, shape: Array, reason: str) -> UnsupportedSchemaError:
        """Return the error for an unsupported array."""
        assert shape.unique_items_node is not None
        return UnsupportedSchemaError("uniqueItems", shape.unique_items_node.where, reason)

    def add(self, options: list[str]) -> str | None:
        """Return the name of a rule with ``options``; None if there are no options."""
        return self._rules.add("unique", choice(options)) if options else None

    def item(self, value: object, is_first: bool) -> str:
        """Return the expression of an item. A comma precedes every item except the first."""
        return sequence(EMPTY if is_first else self._comma, self._rules.add("item", self._write(value)))

    def _items_in_order(self, values: list[object], min_count: int, max_count: int) -> str | None:
        """Return the expression of items in the order of the schema.

        If there are at most ``max_count`` values, items are counted only up to ``min_count``, but at least up
        to 1, because only the first item has no comma.
        """
        max_tracked_count = max(min_count, max_count if max_count < len(values) else 1)
        expressions: list[str | None] = [
            EMPTY if count >= min_count else None for count in range(max_tracked_count + 1)
        ]
        for value in reversed(values):
            new_expressions: list[str | None] = []
            for count in range(max_tracked_count + 1):
                options = []
                can_add = count < max_count or max_count == len(values)
                if can_add and (next_items := expressions[min(count + 1, max_tracked_count)]) is not None:
                    options.append(sequence(self.item(value, count == 0), next_items))
                if (items_without_value := expressions[count]) is not None:
                    options.append(items_without_value)
                new_expressions.append(self.add(options))
            expressions = new_expressions
        return expressions[0]


class _AnyOrderWriter:
    """Writes the items of one array in any order after the prefix, with one rule per set of used values."""

    def __init__(
        self,
        writer: UniqueWriter,
        shape: Array,
        prefix_values: list[list[object]],
        further_values: list[object],
        max_count: int,
    ) -> None:
        self._writer = writer
        self._shape = shape
        self._prefix_values = prefix_values
        self._further_values = further_values
        self._max_count = max_count
        self._rules_by_state: dict[tuple[int, frozenset[Hashable]], str | None] = {}

    def write(self) -> str | None:
        """Return the expression of all items; None if no array is possible."""
        return self._expression_after(0, frozenset())

    def _expression_after(self, count: int, used_values: frozenset[Hashable]) -> str | None:
        """Return the expression after ``count`` items with the values ``used_values``; None if impossible."""
        key = (count, used_values)
        if key not in self._rules_by_state:
            if len(self._rules_by_state) > 2 * MAX_SUBSETS:
                reason = f"with prefixItems, only up to {2 * MAX_SUBSETS} sets of items"
                raise self._writer.unsupported_error(self._shape, reason)
            self._rules_by_state[key] = None
            options = [EMPTY] if count >= self._shape.min_count else []
            if count < self._max_count:
                values = (
                    self._prefix_values[count] if count < len(self._prefix_values) else self._further_values
                )
                for value in values:
                    value_key = equality_key(value)
                    if (
                        value_key not in used_values
                        and (next_items := self._expression_after(count + 1, used_values | {value_key}))
                        is not None
                    ):
                        options.append(sequence(self._writer.item(value, count == 0), next_items))
            self._rules_by_state[key] = self._writer.add(options)
        return self._rules_by_state[key]


def _can_be_distinct(value_lists: list[list[object]], min_count: int) -> bool:
    """Return whether `min_count` items can have distinct values, by bipartite matching.

    Item i has a value in ``value_lists[i]``, and items beyond the lists have a value in the last list.
    """
    item_values = [*value_lists, *[value_lists[-1]] * (min_count - len(value_lists))]
    if min_count > sum(map(len, value_lists)):
        return False
    items_by_value: dict[Hashable, int] = {}  # value -> index of the item with this value

    def assign(index: int, visited_values: set[Hashable]) -> bool:
        for value in item_values[index]:
            value_key = equality_key(value)
            if value_key not in visited_values:
                visited_values.add(value_key)
                if value_key not in items_by_value or assign(items_by_value[value_key], visited_values):
                    items_by_value[value_key] = index
                    return True
        return False

    return all(assign(index, set()) for index in range(min_count))
