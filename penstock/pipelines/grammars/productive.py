"""Which schemas can be satisfied at all, by values that come to an end."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.pipelines.grammars.shapes import (
    Array,
    Conjunction,
    Literal,
    Numeric,
    Object,
    Schemas,
    Shape,
    key_of,
)


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
        return all(self.holds(one) for one in _needed(shape)) and is_possible(shape)

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
            open_ones += [needed for shape in reached[key] for needed in _needed(shape)]
        waiting: dict[tuple[str, ...], list[tuple[tuple[str, ...], int]]] = {}
        holds: set[tuple[str, ...]] = set()
        missing: dict[tuple[tuple[str, ...], int], set[tuple[str, ...]]] = {}
        ready: list[tuple[str, ...]] = []
        for key, shapes in reached.items():
            for place, shape in enumerate(shapes):
                if not is_possible(shape):
                    continue
                keys = {key_of(one) for one in _needed(shape)}
                if any(self._known.get(one) is False for one in keys):
                    continue
                left = {one for one in keys if one not in self._known}
                missing[key, place] = left
                for one in left:
                    waiting.setdefault(one, []).append((key, place))
                if not left:
                    ready.append(key)
        while ready:
            key = ready.pop()
            if key in holds:
                continue
            holds.add(key)
            for user in waiting.get(key, []):
                missing[user].discard(key)
                if not missing[user]:
                    ready.append(user[0])
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


def is_possible(shape: Shape) -> bool:
    """Whether a shape's own bounds let some value be."""
    if isinstance(shape, Numeric):
        low, high = shape.bounds.integers()
        none = shape.is_integer and low is not None and high is not None and low > high
        return not (shape.bounds.is_empty or none)
    if isinstance(shape, Literal):
        return True
    if isinstance(shape, Object) and shape.required - shape.properties.keys() and shape.names is not None:
        return False
    return shape.most is None or shape.least <= shape.most
