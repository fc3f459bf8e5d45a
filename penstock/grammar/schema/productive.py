"""Which schemas can be satisfied at all, by values that come to an end."""

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
    """Which conjunctions must be satisfiable for a shape to be."""

    key: tuple[str, ...]  # of the conjunction that the shape belongs to
    all: set[tuple[str, ...]]  # each of them
    some: Counter[tuple[str, ...]]  # of these, which stand for so many properties, ``missing``
    missing: int

    @property
    def are_met(self) -> bool:
        return not self.all and self.missing <= 0

    def meet(self, key: tuple[str, ...]) -> None:
        """Counts a conjunction as satisfiable."""
        self.all.discard(key)
        self.missing -= self.some.pop(key, 0)


class Productive:
    """Which conjunctions some finite value satisfies.

    A schema that can only be satisfied by a value that holds such a value again has none; a grammar that went
    into one would never come to an end.
    """

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._known: dict[tuple[str, ...], bool] = {}

    def holds(self, conjunction: Conjunction) -> bool:
        """Whether some value satisfies a conjunction."""
        key = key_of(conjunction)
        if key not in self._known:
            self._settle(conjunction)
        return self._known[key]

    def has(self, shape: Shape) -> bool:
        """Whether some value has the shape."""
        if not self._is_possible(shape) or not all(self.holds(one) for one in _needed(shape)):
            return False
        if not isinstance(shape, Object) or shape.least <= len(shape.required):
            return True
        some, missing = _optional(shape)
        return sum(self.holds(one) for one in some) >= missing

    def _is_possible(self, shape: Shape) -> bool:
        return is_possible(shape) and (
            not isinstance(shape, Array) or shape.unique_at is None or has_enough_items(self._schemas, shape)
        )

    def _needs(self, key: tuple[str, ...], shape: Shape) -> _Needs:
        """What a shape still needs, beside what is known."""
        needed = {key_of(one) for one in _needed(shape)}
        some, missing = _optional(shape)
        result = _Needs(key, needed, Counter(key_of(one) for one in some), missing)
        for one in [*needed, *result.some]:
            if self._known.get(one):
                result.meet(one)
        return result

    def _settle(self, conjunction: Conjunction) -> None:
        """All that is reachable from here: at first nothing is satisfiable, then what needs only what is."""
        reached: dict[tuple[str, ...], list[Shape]] = {}
        open_ones = [conjunction]
        while open_ones:
            asked = open_ones.pop()
            key = key_of(asked)
            if key in reached or key in self._known:
                continue
            reached[key] = self._schemas.shapes(asked)
            open_ones += [
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
                if needs.are_met:
                    ready.append(key)
        while ready:
            key = ready.pop()
            if key in holds:
                continue
            holds.add(key)
            for needs in waiting.get(key, []):
                needs.meet(key)
                if needs.are_met:
                    ready.append(needs.key)
        for key in reached:
            self._known[key] = key in holds


def _needed(shape: Shape) -> Iterator[Conjunction]:
    """What every value of a shape holds."""
    if isinstance(shape, Array):
        for index in range(min(shape.least, len(shape.prefix) + 1)):
            yield shape.item(index)
    elif isinstance(shape, Object):
        for name in sorted(shape.required):
            yield shape.property(name)


def _optional(shape: Shape) -> tuple[list[Conjunction], int]:
    """Properties that an object may have, and how many of them it must have."""
    if not isinstance(shape, Object) or shape.least <= len(shape.required):
        return [], 0
    named = [one for name, one in shape.properties.items() if name not in shape.required]
    others = [] if is_closed(shape) else [shape.others]
    # Other properties may repeat a name, so that only one of them counts; more are refused later.
    return [*named, *others * (shape.least - len(shape.required))], shape.least - len(shape.required)


def is_possible(shape: Shape) -> bool:
    """Whether a shape's own bounds let some value be."""
    if isinstance(shape, Literal):
        return True
    if isinstance(shape, Numeric):
        return _is_number_possible(shape)
    if isinstance(shape, Object):
        if shape.required - shape.properties.keys() and shape.names is not None:
            return False
        return shape.most is None or max(shape.least, len(shape.required)) <= shape.most
    if shape.most is not None and shape.least > shape.most:
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
