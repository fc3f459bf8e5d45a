"""Finds the schemas that some finite value satisfies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.grammar.schema.languages import language_of
from penstock.grammar.schema.numbers import numbers_between
from penstock.grammar.schema.shapes import (
    Array,
    Conjunction,
    Literal,
    Numeric,
    Object,
    Schemas,
    Shape,
    StringShape,
    is_closed,
    key_of,
)
from penstock.grammar.schema.unique import has_enough_items


@dataclass(slots=True)
class _Needs:
    """The conjunctions that must be satisfiable for a shape to be satisfiable."""

    key: tuple[str, ...]  # the conjunction of the shape
    all: set[tuple[str, ...]]  # each of these must be satisfiable
    some: Counter[tuple[str, ...]]  # at least ``missing`` properties of these
    missing: int

    @property
    def is_satisfied(self) -> bool:
        return not self.all and self.missing <= 0

    def mark_satisfiable(self, key: tuple[str, ...]) -> None:
        """Record that a conjunction is satisfiable."""
        self.all.discard(key)
        self.missing -= self.some.pop(key, 0)


class Productive:
    """Computes which conjunctions some finite value satisfies.

    A recursive schema whose every value contains another value of the schema has no finite value. A grammar
    for it would never end.
    """

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._known: dict[tuple[str, ...], bool] = {}

    def holds(self, conjunction: Conjunction) -> bool:
        """Return whether some value satisfies a conjunction."""
        key = key_of(conjunction)
        if key not in self._known:
            self._compute(conjunction)
        return self._known[key]

    def has(self, shape: Shape) -> bool:
        """Return whether some value matches the shape."""
        if not self._is_possible(shape) or not all(self.holds(one) for one in _needed(shape)):
            return False
        if not isinstance(shape, Object) or shape.min_count <= len(shape.required):
            return True
        some, missing = _optional(shape)
        return sum(self.holds(one) for one in some) >= missing

    def _is_possible(self, shape: Shape) -> bool:
        return is_possible(shape) and (
            not isinstance(shape, Array) or shape.unique_at is None or has_enough_items(self._schemas, shape)
        )

    def _needs(self, key: tuple[str, ...], shape: Shape) -> _Needs:
        """Return the unresolved needs of a shape."""
        needed = {key_of(one) for one in _needed(shape)}
        some, missing = _optional(shape)
        result = _Needs(key, needed, Counter(key_of(one) for one in some), missing)
        for one in [*needed, *result.some]:
            if self._known.get(one):
                result.mark_satisfiable(one)
        return result

    def _compute(self, conjunction: Conjunction) -> None:
        """Compute the least fixpoint: a shape is satisfiable if all of its needs are."""
        reached: dict[tuple[str, ...], list[Shape]] = {}
        pending = [conjunction]
        while pending:
            current = pending.pop()
            key = key_of(current)
            if key in reached or key in self._known:
                continue
            reached[key] = self._schemas.shapes(current)
            pending += [
                needed for shape in reached[key] for needed in (*_needed(shape), *_optional(shape)[0])
            ]
        waiting: dict[tuple[str, ...], list[_Needs]] = {}
        holds: set[tuple[str, ...]] = set()
        ready: list[tuple[str, ...]] = []
        for key, shapes in reached.items():
            for shape in shapes:
                if not self._is_possible(shape):
                    continue
                needs = self._needs(key, shape)
                for one in needs.all | set(needs.some):
                    waiting.setdefault(one, []).append(needs)
                if needs.is_satisfied:
                    ready.append(key)
        while ready:
            key = ready.pop()
            if key in holds:
                continue
            holds.add(key)
            for needs in waiting.get(key, []):
                needs.mark_satisfiable(key)
                if needs.is_satisfied:
                    ready.append(needs.key)
        for key in reached:
            self._known[key] = key in holds


def _needed(shape: Shape) -> Iterator[Conjunction]:
    """Yield the conjunctions that every value of a shape contains."""
    if isinstance(shape, Array):
        for index in range(min(shape.min_count, len(shape.prefix) + 1)):
            yield shape.item(index)
    elif isinstance(shape, Object):
        for name in sorted(shape.required):
            yield shape.property(name)


def _optional(shape: Shape) -> tuple[list[Conjunction], int]:
    """Return the optional properties of an object, and how many of them are needed."""
    if not isinstance(shape, Object) or shape.min_count <= len(shape.required):
        return [], 0
    named = [one for name, one in shape.properties.items() if name not in shape.required]
    others = [] if is_closed(shape) else [shape.others]
    # Other properties may repeat a name, so only one of them counts. More are refused later.
    return [*named, *others * (shape.min_count - len(shape.required))], shape.min_count - len(shape.required)


def is_possible(shape: Shape) -> bool:
    """Return whether the bounds of a shape allow some value."""
    if isinstance(shape, Literal):
        return True
    if isinstance(shape, Numeric):
        return _is_number_possible(shape)
    if isinstance(shape, Object):
        if shape.required - shape.properties.keys() and shape.names is not None:
            return False
        return shape.max_count is None or max(shape.min_count, len(shape.required)) <= shape.max_count
    if shape.max_count is not None and shape.min_count > shape.max_count:
        return False
    return not isinstance(shape, StringShape) or not shape.conditions or language_of(shape) is not None


def _is_number_possible(shape: Numeric) -> bool:
    low, high = shape.bounds.integers()
    if shape.bounds.is_empty:
        return False
    if not shape.is_integer:
        return low is None or high is None or low <= high or numbers_between(shape.bounds) is not None
    if low is None or high is None:
        return True
    return -(-low // shape.multiple_of) * shape.multiple_of <= high
