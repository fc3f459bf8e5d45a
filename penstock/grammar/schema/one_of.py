"""Reads ``oneOf``: computes the values that match exactly one of several schemas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from penstock.errors import UnsupportedSchemaError
from penstock.grammar.schema.intersections import has_shape, intersect_all, or_infinity, union
from penstock.grammar.schema.keywords import equality_key, read_branches
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


def exactly_one(schemas: Schemas, node: SchemaNode, shapes: Sequence[Shape]) -> list[Shape]:
    """Return the values of ``shapes`` that match exactly one branch, as a union of shapes.

    Literals and shapes that several branches have in common are removed from all of them. If object shapes of
    two branches may overlap, each shape forbids a property that the other shape requires. This can also
    exclude objects that match only one branch.

    Raises:
        UnsupportedSchemaError: two branches may overlap in any other way.
    """
    shapes_by_branch = [
        intersect_all(schemas, shapes, schemas.shapes((branch,)), node)
        for branch in read_branches(node, "oneOf")
    ]
    num_branches_by_literal = Counter(
        key
        for branch_shapes in shapes_by_branch
        for key in {equality_key(shape.value) for shape in branch_shapes if isinstance(shape, Literal)}
    )
    indexed_shapes = [  # (index of the branch, shape)
        (branch_index, shape)
        for branch_index, branch_shapes in enumerate(shapes_by_branch)
        for shape in branch_shapes
    ]
    non_literals = [(index, shape) for index, shape in indexed_shapes if not isinstance(shape, Literal)]
    result: list[Shape] = []
    for branch_index, shape in indexed_shapes:
        if isinstance(shape, Literal):
            if num_branches_by_literal[equality_key(shape.value)] == 1:
                result.append(_exclude_other_branches(schemas, shape, branch_index, non_literals, node))
        elif not any(
            other_index != branch_index and shape == other_shape for other_index, other_shape in non_literals
        ):
            result.append(_exclude_other_branches(schemas, shape, branch_index, indexed_shapes, node))
    return union([result], node)


def _exclude_other_branches(
    schemas: Schemas,
    shape: Shape,
    branch_index: int,
    indexed_shapes: Sequence[tuple[int, Shape]],
    node: SchemaNode,
) -> Shape:
    """Return the shape of a branch, restricted so that no shape of another branch matches its values.

    Args:
        schemas: gives the shapes of properties.
        shape: the shape.
        branch_index: the index of the branch of ``shape``.
        indexed_shapes: pairs (index of the branch, shape). Shapes of the branch of ``shape`` are ignored.
        node: the schema that error messages name.

    Raises:
        UnsupportedSchemaError: the shape cannot be restricted in this way.
    """
    for other_index, other_shape in indexed_shapes:
        if other_index != branch_index and not _are_disjoint(schemas, shape, other_shape):
            restricted_shape = _forbid_required_property(schemas, shape, other_shape)
            if restricted_shape is None:
                raise _overlap_error(node, min(branch_index, other_index), max(branch_index, other_index))
            shape = restricted_shape
    return shape


def _forbid_required_property(schemas: Schemas, shape: Shape, other_shape: Shape) -> Shape | None:
    """Return ``shape`` without the objects that have a certain property, which ``other_shape`` requires.

    Returns None if a shape is not an object shape, or no such property can be forbidden.
    """
    if not isinstance(shape, Object) or not isinstance(other_shape, Object):
        return None
    # A name that matches the pattern of the shape's other properties cannot be forbidden.
    forbidden_names = [
        name
        for name in sorted(other_shape.required - shape.required)
        if name in shape.properties or shape.names is None or not has_shape(schemas, shape.names, name)
    ]
    if not forbidden_names:
        return None
    # Prefer a property that the shape does not name, which excludes the fewest values.
    name = min(forbidden_names, key=lambda name: name in shape.properties)
    return replace(shape, properties={**shape.properties, name: NEVER})


def _is_never(conjunction: Conjunction) -> bool:
    return any(node.schema is False for node in conjunction)


def _are_disjoint(schemas: Schemas, a: Shape, b: Shape, depth: int = 0) -> bool:
    """Return whether two shapes are known to have no common value.

    ``depth`` is the number of enclosing objects. At depth 3, the values of properties that both objects
    require are not compared.
    """
    if isinstance(b, Literal):
        a, b = b, a
    if isinstance(a, Literal):
        return not has_shape(schemas, b, a.value)
    if type(a) is not type(b):
        return True
    if isinstance(a, Numeric) and isinstance(b, Numeric):
        return a.bounds.intersection(b.bounds).is_empty
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
            _are_disjoint(schemas, first_shape, second_shape, depth + 1)
            for first_shape in schemas.shapes(a.property(name))
            for second_shape in schemas.shapes(b.property(name))
        )
        for name in a.required & b.required
    )


def _overlap_error(node: SchemaNode, first: int, second: int) -> UnsupportedSchemaError:
    reason = (
        f"its branches {first} and {second} may both match: use anyOf, or give each branch a required "
        "property with a different const"
    )
    return UnsupportedSchemaError("oneOf", node.where, reason)
