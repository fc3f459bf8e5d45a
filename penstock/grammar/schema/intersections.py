"""Computes intersections of shapes, and tests whether values match shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal

from penstock.errors import InputError, UnsupportedSchemaError
from penstock.grammar.schema import regex
from penstock.grammar.schema.formats import has_format
from penstock.grammar.schema.keywords import are_unique, equality_key, is_number, to_decimal
from penstock.grammar.schema.shapes import (
    Array,
    Condition,
    Literal,
    Numeric,
    Object,
    SchemaNode,
    Schemas,
    Shape,
    StringShape,
    conjoin,
)

MAX_SHAPES = 1000  # of a union, not counting literals


def intersect_all(
    schemas: Schemas, first: Sequence[Shape], second: Sequence[Shape], node: SchemaNode
) -> list[Shape]:
    """Return the intersection of two unions of shapes, as a union of shapes.

    ``node`` is the schema that error messages name.

    Raises:
        InputError: the result has more than `MAX_SHAPES` shapes other than literals.
        UnsupportedSchemaError: ``patternProperties`` is combined with another schema that restricts the
            properties of the same object.
    """
    return union([_intersections(schemas, first, second)], node)


def _intersections(schemas: Schemas, first: Sequence[Shape], second: Sequence[Shape]) -> Iterator[Shape]:
    literals = {equality_key(b.value) for b in second if isinstance(b, Literal)}
    non_literals = [b for b in second if not isinstance(b, Literal)]
    for a in first:
        if isinstance(a, Literal):  # a set lookup, so that long lists of literals take linear time
            if equality_key(a.value) in literals or any(has_shape(schemas, b, a.value) for b in non_literals):
                yield a
        else:
            yield from (common for b in second if (common := _intersect(schemas, a, b)) is not None)


def union(options: Sequence[Iterable[Shape]], node: SchemaNode) -> list[Shape]:
    """Return the shapes of several unions as one union, without duplicate literals.

    Raises:
        InputError: the union has more than `MAX_SHAPES` shapes other than literals.
    """
    result: list[Shape] = []
    literals: set[object] = set()
    for shape in (shape for option in options for shape in option):
        if isinstance(shape, Literal):
            key = equality_key(shape.value)
            if key in literals:
                continue
            literals.add(key)
        elif len(result) - len(literals) >= MAX_SHAPES:
            raise InputError(
                f"the JSON schema at {node.where} has more than {MAX_SHAPES} combinations: "
                "nest fewer anyOf and oneOf"
            )
        result.append(shape)
    return result


def _intersect(schemas: Schemas, a: Shape, b: Shape) -> Shape | None:
    if isinstance(b, Literal):
        a, b = b, a
    if isinstance(a, Literal):
        return a if has_shape(schemas, b, a.value) else None
    if isinstance(a, Numeric) and isinstance(b, Numeric):
        factor = math.lcm(a.multiple_of, b.multiple_of)
        location = a.location if a.multiple_of > 1 else b.location
        return Numeric(a.bounds.intersection(b.bounds), a.is_integer or b.is_integer, factor, location)
    if isinstance(a, StringShape) and isinstance(b, StringShape):
        return intersect_strings(a, b)
    if isinstance(a, Array) and isinstance(b, Array):
        length = max(len(a.prefix), len(b.prefix))
        prefix = tuple(conjoin(a.item(i), b.item(i)) for i in range(length))
        items = conjoin(a.items, b.items)
        unique_items_node = a.unique_items_node or b.unique_items_node
        return Array(
            prefix,
            items,
            max(a.min_count, b.min_count),
            _min_bound(a.max_count, b.max_count),
            unique_items_node,
        )
    if isinstance(a, Object) and isinstance(b, Object):
        return _intersect_objects(a, b)
    return None


def intersect_strings(a: StringShape, b: StringShape) -> StringShape:
    """Return the shape of the strings that are in both shapes."""
    conditions = tuple(dict.fromkeys((*a.conditions, *b.conditions)))
    return StringShape(max(a.min_count, b.min_count), _min_bound(a.max_count, b.max_count), conditions)


def _intersect_objects(a: Object, b: Object) -> Object:
    for shape, other_shape in ((a, b), (b, a)):
        if shape.names is not None and (
            other_shape.properties or other_shape.required or other_shape.restricts_additional
        ):
            reason = "not together with propertyNames, nor with a second schema of the same object"
            raise UnsupportedSchemaError("patternProperties", shape.location, reason)
    names = [*a.properties, *(name for name in b.properties if name not in a.properties)]
    return Object(
        {name: conjoin(a.property(name), b.property(name)) for name in names},
        a.required | b.required,
        conjoin(a.additional_properties, b.additional_properties),
        a.restricts_additional or b.restricts_additional,
        a.names or b.names,
        max(a.min_count, b.min_count),
        _min_bound(a.max_count, b.max_count),
        a.location if a.min_count >= b.min_count else b.location,
    )


def has_shape(schemas: Schemas, shape: Shape, value: object) -> bool:
    """Return whether a value matches a shape."""
    if isinstance(shape, Literal):
        return bool(equality_key(shape.value) == equality_key(value))
    if isinstance(shape, Numeric):
        return is_number(value) and _is_in_numeric_shape(shape, to_decimal(value))
    if isinstance(shape, StringShape):
        return isinstance(value, str) and (
            shape.min_count <= len(value) <= or_infinity(shape.max_count)
            and all(satisfies(condition, value) for condition in shape.conditions)
        )
    if isinstance(shape, Array):
        return isinstance(value, list) and (
            shape.min_count <= len(value) <= or_infinity(shape.max_count)
            and (shape.unique_items_node is None or are_unique(value))
            and all(schemas.accepts(shape.item(i), item) for i, item in enumerate(value))
        )
    return isinstance(value, dict) and (
        shape.required <= value.keys()
        and shape.min_count <= len(value) <= or_infinity(shape.max_count)
        and all(_has_property(schemas, shape, name, member) for name, member in value.items())
    )


def satisfies(condition: Condition, value: str) -> bool:
    """Return whether a string satisfies a condition."""
    if condition.format is not None:
        return has_format(condition.format, value)
    return regex.matches(condition.tree, value) != condition.is_negated


def _has_property(schemas: Schemas, shape: Object, name: str, value: object) -> bool:
    if name not in shape.properties and shape.names is not None and not has_shape(schemas, shape.names, name):
        return False
    return schemas.accepts(shape.property(name), value)


def _is_in_numeric_shape(shape: Numeric, value: Decimal) -> bool:
    if not shape.bounds.contains(value):
        return False
    integer = int(value)  # the % of Decimal is limited to 28 digits
    return not shape.is_integer or (value == integer and integer % shape.multiple_of == 0)


def _min_bound(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def or_infinity(max_count: int | None) -> float:
    """Return a maximum count as a number for comparisons: infinity for None."""
    return math.inf if max_count is None else max_count
