"""Shapes: sets of JSON values of one type. Also the table of unsupported keywords.

Several schemas can apply to one value: with ``allOf``, with ``$ref`` and other keywords in one schema, or if
two schemas that apply to an object have a property of the same name. The value must satisfy their
*conjunction*. `reader.Reader` converts a conjunction to a union of shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from penstock.grammar.schema import regex
from penstock.grammar.schema.numbers import UNBOUNDED, Bounds

REFUSED_KEYWORDS = {
    "not": "a mask cannot exclude values token by token: describe the allowed values",
    "if": "use anyOf with a const that distinguishes the cases",
    "then": "use anyOf with a const that distinguishes the cases",
    "else": "use anyOf with a const that distinguishes the cases",
    "contains": "the matching item is not known in advance: describe the items with prefixItems",
    "minContains": "use minItems",
    "maxContains": "use maxItems",
    "dependencies": "use dependentRequired or dependentSchemas",
    "additionalItems": "use prefixItems and items",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "divisibleBy": "use multipleOf",
    "disallow": "use anyOf with the allowed types",
    "extends": "use allOf",
}
"""Unsupported keyword -> advice in the error message."""


@dataclass(frozen=True, slots=True, eq=False)
class SchemaNode:
    """A schema and its location in the document, usually a JSON pointer."""

    schema: Any
    where: str


Conjunction: TypeAlias = tuple[SchemaNode, ...]
ANYTHING: Conjunction = ()
NEVER: Conjunction = (SchemaNode(False, "#false"),)


@dataclass(frozen=True, slots=True)
class Literal:
    """A single value."""

    value: object


@dataclass(frozen=True, slots=True)
class Numeric:
    """Numbers in an interval. ``location`` is the location of the schema with multipleOf, for errors."""

    bounds: Bounds = UNBOUNDED
    is_integer: bool = False
    multiple_of: int = 1
    location: str = "#"


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a string: a pattern or a format."""

    tree: regex.RegexNode
    source: SchemaNode = field(compare=False)
    keyword: str = field(compare=False)
    is_negated: bool = False  # True for a negated lookahead: the string must not match
    format: str | None = None  # name of the format, whose check can accept more strings than the tree


@dataclass(frozen=True, slots=True)
class StringShape:
    """Strings with bounds on the length and further conditions."""

    min_count: int = 0
    max_count: int | None = None
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class Array:
    """Arrays, with one conjunction for each of the first items and one conjunction for all other items."""

    prefix: tuple[Conjunction, ...] = ()
    items: Conjunction = ANYTHING
    min_count: int = 0
    max_count: int | None = None
    # The schema with uniqueItems, if any
    unique_items_node: SchemaNode | None = field(default=None, compare=False)

    def item(self, index: int) -> Conjunction:
        """Return the conjunction that the item at an index must satisfy."""
        return self.prefix[index] if index < len(self.prefix) else self.items


@dataclass(frozen=True, slots=True)
class Object:
    """Objects, with one conjunction for each named property and one conjunction for all other properties."""

    properties: dict[str, Conjunction] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    additional_properties: Conjunction = ANYTHING
    restricts_additional: bool = False  # whether the schema constrains additional properties
    names: StringShape | None = None  # restricts the names of additional properties
    min_count: int = 0
    max_count: int | None = None
    location: str = "#"  # location of the schema, for errors

    def property(self, name: str) -> Conjunction:
        """Return the conjunction that a property must satisfy."""
        return self.properties.get(name, self.additional_properties)


Shape: TypeAlias = Literal | Numeric | StringShape | Array | Object


class Schemas(Protocol):
    """The methods of `reader.Reader` with which functions on shapes read nested schemas."""

    def shapes(self, conjunction: Conjunction) -> list[Shape]:
        """Return the values of a conjunction as a union of shapes; empty if there are none."""
        ...

    def accepts(self, conjunction: Conjunction, value: object) -> bool:
        """Return whether a value satisfies a conjunction."""
        ...


def is_closed(shape: Object) -> bool:
    """Return whether the grammar of an object shape allows only named properties.

    This is the case if the schema forbids other properties, or if it names properties and has no keyword for
    other properties.
    """
    if shape.restricts_additional:
        return shape.additional_properties != ANYTHING and any(
            node.schema is False for node in shape.additional_properties
        )
    return bool(shape.properties or shape.required)


def conjunction_key(conjunction: Conjunction) -> tuple[str, ...]:
    """Return a key that is equal for conjunctions of the same schemas."""
    return tuple(sorted({node.where for node in conjunction}))


def conjoin(a: Conjunction, b: Conjunction) -> Conjunction:
    """Return the conjunction of two conjunctions, without duplicate schemas."""
    return tuple({node.where: node for node in (*a, *b)}.values())
