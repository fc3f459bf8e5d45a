"""``oneOf``: values of exactly one of several schemas, if this can be decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import UnsupportedSchemaError
from penstock.grammar.schema.intersections import has_shape, intersect_all, or_infinity, union
from penstock.grammar.schema.keywords import branches_of, identity
from penstock.grammar.schema.shapes import (
    NEVER,
    Array,
    Conjunction,
    Literal,
    Numeric,
    Object,
    SchemaNode,
    Schemas,
    Shape,
    StringShape,
)


def exactly_one(schemas: Schemas, node: SchemaNode, found: Sequence[Shape]) -> list[Shape]:
    """Return the shapes of ``found`` that are in exactly one branch; refuse schemas that are undecidable.

    The intersection of two branches is removed from both. If two object shapes may overlap, each must lack a
    property that the other one requires.
    """
    options = [
        intersect_all(schemas, found, schemas.shapes((branch,)), node)
        for branch in branches_of(node, "oneOf")
    ]
    num_branches = Counter(
        key
        for option in options
        for key in {identity(shape.value) for shape in option if isinstance(shape, Literal)}
    )
    entries = [(index, shape) for index, option in enumerate(options) for shape in option]
    non_literals = [entry for entry in entries if not isinstance(entry[1], Literal)]
    result: list[Shape] = []
    for index, shape in entries:
        if isinstance(shape, Literal):
            if num_branches[identity(shape.value)] == 1:
                result.append(_only(schemas, shape, index, non_literals, node))
        elif not any(other != index and shape == rival for other, rival in non_literals):
            result.append(_only(schemas, shape, index, entries, node))
    return union([result], node)


def _only(
    schemas: Schemas, shape: Shape, index: int, rivals: Sequence[tuple[int, Shape]], node: SchemaNode
) -> Shape:
    """Return the shape without the values that its rivals match too."""
    for other, rival in rivals:
        if other != index and not _are_apart(schemas, shape, rival):
            narrowed = _without(schemas, shape, rival)
            if narrowed is None:
                raise _overlap(node, min(index, other), max(index, other))
            shape = narrowed
    return shape


def _without(schemas: Schemas, shape: Shape, rival: Shape) -> Shape | None:
    """Return an object shape without one property that the rival requires, so that the rival cannot match."""
    if not isinstance(shape, Object) or not isinstance(rival, Object):
        return None
    # Not possible: a name that matches the shape's pattern would still be allowed.
    missing = [
        name
        for name in sorted(rival.required - shape.required)
        if name in shape.properties or shape.names is None or not has_shape(schemas, shape.names, name)
    ]
    if not missing:
        return None
    # A property that the shape does not name excludes the fewest values.
    name = min(missing, key=lambda name: name in shape.properties)
    return replace(shape, properties={**shape.properties, name: NEVER})


def _is_never(conjunction: Conjunction) -> bool:
    return any(node.schema is False for node in conjunction)


def _are_apart(schemas: Schemas, a: Shape, b: Shape, depth: int = 0) -> bool:
    """Return whether the two shapes certainly have no value in common."""
    if isinstance(b, Literal):
        a, b = b, a
    if isinstance(a, Literal):
        return not has_shape(schemas, b, a.value)
    if type(a) is not type(b):
        return True
    if isinstance(a, Numeric) and isinstance(b, Numeric):
        return a.bounds.both(b.bounds).is_empty
    if isinstance(a, StringShape) and isinstance(b, StringShape):
        return a.min_count > or_infinity(b.max_count) or b.min_count > or_infinity(a.max_count)
    if isinstance(a, Array) and isinstance(b, Array):
        return a.min_count > or_infinity(b.max_count) or b.min_count > or_infinity(a.max_count)
    assert isinstance(a, Object)
    assert isinstance(b, Object)
    if any(_is_never(b.property(name)) for name in a.required - b.required):
        return True
    if any(_is_never(a.property(name)) for name in b.required - a.required):
        return True
    return depth < 3 and any(
        all(
            _are_apart(schemas, one, other, depth + 1)
            for one in schemas.shapes(a.property(name))
            for other in schemas.shapes(b.property(name))
        )
        for name in a.required & b.required
    )


def _overlap(node: SchemaNode, first: int, second: int) -> UnsupportedSchemaError:
    reason = (
        f"its branches {first} and {second} may both match: use anyOf, or give each a required property "
        "with a const of its own"
    )
    return UnsupportedSchemaError("oneOf", node.where, reason)
