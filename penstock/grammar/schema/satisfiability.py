"""Determines whether a schema has at least one finite value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.grammar.schema.languages import string_language
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
    conjunction_key,
    is_closed,
)
from penstock.grammar.schema.unique import has_enough_items


@dataclass(slots=True)
class _Requirements:
    """The conjunctions that must be satisfiable for a shape to be satisfiable."""

    key: tuple[str, ...]  # the conjunction whose union of shapes contains the shape
    required_keys: set[tuple[str, ...]]  # conjunctions that must all be satisfiable
    # Conjunctions of optional properties. At least ``num_missing`` of them must be satisfiable.
    optional_keys: Counter[tuple[str, ...]]
    num_missing: int

    @property
    def is_satisfied(self) -> bool:
        return not self.required_keys and self.num_missing <= 0

    def mark_satisfiable(self, key: tuple[str, ...]) -> None:
        """Record that a conjunction is satisfiable."""
        self.required_keys.discard(key)
        self.num_missing -= self.optional_keys.pop(key, 0)


class Satisfiability:
    """Determines whether a conjunction of schemas has at least one finite value.

    If every value of a recursive schema contains another value of the schema, there is no finite value. The
    grammar of such a schema would match no finite text.
    """

    def __init__(self, schemas: Schemas) -> None:
        self._schemas = schemas
        self._results: dict[tuple[str, ...], bool] = {}

    def is_satisfiable(self, conjunction: Conjunction) -> bool:
        """Return whether some value satisfies a conjunction."""
        key = conjunction_key(conjunction)
        if key not in self._results:
            self._compute(conjunction)
        return self._results[key]

    def has_value(self, shape: Shape) -> bool:
        """Return whether some value matches the shape."""
        if not self._is_possible(shape) or not all(
            self.is_satisfiable(conjunction) for conjunction in _required_conjunctions(shape)
        ):
            return False
        if not isinstance(shape, Object) or shape.min_count <= len(shape.required):
            return True
        optional_conjunctions, num_missing = _optional_properties(shape)
        return sum(self.is_satisfiable(conjunction) for conjunction in optional_conjunctions) >= num_missing

    def _is_possible(self, shape: Shape) -> bool:
        return is_possible(shape) and (
            not isinstance(shape, Array)
            or shape.unique_items_node is None
            or has_enough_items(self._schemas, shape)
        )

    def _requirements(self, key: tuple[str, ...], shape: Shape) -> _Requirements:
        """Return the conjunctions that a shape needs, without those that are known to be satisfiable."""
        required_keys = {conjunction_key(conjunction) for conjunction in _required_conjunctions(shape)}
        optional_conjunctions, num_missing = _optional_properties(shape)
        optional_keys = Counter(conjunction_key(conjunction) for conjunction in optional_conjunctions)
        result = _Requirements(key, required_keys, optional_keys, num_missing)
        for needed_key in [*required_keys, *optional_keys]:
            if self._results.get(needed_key):
                result.mark_satisfiable(needed_key)
        return result

    def _compute(self, conjunction: Conjunction) -> None:
        """Determine the satisfiability of a conjunction and of all conjunctions that it refers to.

        The method computes a least fixpoint. A shape is satisfiable if all conjunctions that it needs are
        satisfiable.
        """
        shapes_by_key: dict[tuple[str, ...], list[Shape]] = {}
        pending = [conjunction]
        while pending:
            pending_conjunction = pending.pop()
            key = conjunction_key(pending_conjunction)
            if key in shapes_by_key or key in self._results:
                continue
            shapes_by_key[key] = self._schemas.shapes(pending_conjunction)
            pending += [
                nested_conjunction
                for shape in shapes_by_key[key]
                for nested_conjunction in (*_required_conjunctions(shape), *_optional_properties(shape)[0])
            ]
        dependents: dict[tuple[str, ...], list[_Requirements]] = {}
        satisfiable_keys: set[tuple[str, ...]] = set()
        new_keys: list[tuple[str, ...]] = []
        for key, shapes in shapes_by_key.items():
            for shape in shapes:
                if not self._is_possible(shape):
                    continue
                requirements = self._requirements(key, shape)
                for needed_key in requirements.required_keys | set(requirements.optional_keys):
                    dependents.setdefault(needed_key, []).append(requirements)
                if requirements.is_satisfied:
                    new_keys.append(key)
        while new_keys:
            key = new_keys.pop()
            if key in satisfiable_keys:
                continue
            satisfiable_keys.add(key)
            for requirements in dependents.get(key, []):
                requirements.mark_satisfiable(key)
                if requirements.is_satisfied:
                    new_keys.append(requirements.key)
        for key in shapes_by_key:
            self._results[key] = key in satisfiable_keys


def _required_conjunctions(shape: Shape) -> Iterator[Conjunction]:
    """Yield the conjunctions of the items or properties that every value of a shape contains."""
    if isinstance(shape, Array):
        for index in range(min(shape.min_count, len(shape.prefix) + 1)):
            yield shape.item(index)
    elif isinstance(shape, Object):
        for name in sorted(shape.required):
            yield shape.property(name)


def _optional_properties(shape: Shape) -> tuple[list[Conjunction], int]:
    """Return (conjunctions of an object's optional properties, number of them that every value needs)."""
    if not isinstance(shape, Object) or shape.min_count <= len(shape.required):
        return [], 0
    optional_conjunctions = [
        conjunction for name, conjunction in shape.properties.items() if name not in shape.required
    ]
    additional_properties = [] if is_closed(shape) else [shape.additional_properties]
    # The schema of additional properties is listed once per missing property. `json_schema` rejects objects
    # that need more than one additional property.
    return [
        *optional_conjunctions,
        *additional_properties * (shape.min_count - len(shape.required)),
    ], shape.min_count - len(shape.required)


def is_possible(shape: Shape) -> bool:
    """Return whether a shape allows a value by its bounds, required names and string conditions alone.

    Nested schemas are ignored.
    """
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
    return not isinstance(shape, StringShape) or not shape.conditions or string_language(shape) is not None


def _is_number_possible(shape: Numeric) -> bool:
    low, high = shape.bounds.integers()
    if shape.bounds.is_empty:
        return False
    if not shape.is_integer:
        return low is None or high is None or low <= high or numbers_between(shape.bounds) is not None
    if low is None or high is None:
        return True
    return -(-low // shape.multiple_of) * shape.multiple_of <= high
