"""The shapes that a JSON value may have, each of one JSON type, and the unsupported keywords.

A value must satisfy a *conjunction* of schemas (``allOf``, ``$ref`` with other keywords, the same property
in two schemas). `reader.Reader` multiplies it out into alternatives of shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from penstock.grammar.schema import regex
from penstock.grammar.schema.numbers import UNBOUNDED, Bounds

REFUSED = {
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


@dataclass(frozen=True, slots=True, eq=False)
class SchemaNode:
    """A schema and its location in the document."""

    schema: Any
    where: str


Conjunction: TypeAlias = tuple[SchemaNode, ...]
ANYTHING: Conjunction = ()
NEVER: Conjunction = (SchemaNode(False, "#false"),)


@dataclass(frozen=True, slots=True)
class Literal:
    """One value."""

    value: object


@dataclass(frozen=True, slots=True)
class Numeric:
    """Numbers in an interval."""

    bounds: Bounds = UNBOUNDED
    is_integer: bool = False
    multiple_of: int = 1
    source: str = "#"


@dataclass(frozen=True, slots=True)
class Condition:
    """The condition of a pattern or a format on a string."""

    tree: regex.RegexNode
    source: SchemaNode = field(compare=False)
    keyword: str = field(compare=False)
    is_negated: bool = False  # a negated lookahead: the string must not match
    format: str | None = None  # the format, whose check of a value may accept more than the tree


@dataclass(frozen=True, slots=True)
class StringShape:
    """Strings with bounds on the length and further conditions."""

    min_count: int = 0
    max_count: int | None = None
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class Array:
    """Arrays: schemas of the first items, then of all others."""

    prefix: tuple[Conjunction, ...] = ()
    items: Conjunction = ANYTHING
    min_count: int = 0
    max_count: int | None = None
    unique_at: SchemaNode | None = field(default=None, compare=False)  # the schema that has uniqueItems

    def item(self, index: int) -> Conjunction:
        """Return the conjunction that the item at an index must satisfy."""
        return self.prefix[index] if index < len(self.prefix) else self.items


@dataclass(frozen=True, slots=True)
class Object:
    """Objects: schemas of named properties and of all others."""

    properties: dict[str, Conjunction] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    others: Conjunction = ANYTHING
    restricts_others: bool = False  # whether a schema constrains other properties
    names: StringShape | None = None  # the names of the other properties
    min_count: int = 0
    max_count: int | None = None
    minimum_at: str = "#"

    def property(self, name: str) -> Conjunction:
        """Return the conjunction that a property must satisfy."""
        return self.properties.get(name, self.others)


Shape: TypeAlias = Literal | Numeric | StringShape | Array | Object


class Schemas(Protocol):
    """The part of `reader.Reader` that shapes with nested schemas use."""

    def shapes(self, conjunction: Conjunction) -> list[Shape]:
        """Return the alternatives of a conjunction; empty if no value satisfies it."""
        ...

    def accepts(self, conjunction: Conjunction, value: object) -> bool:
        """Return whether a value satisfies a conjunction."""
        ...


def is_closed(shape: Object) -> bool:
    """Return whether other properties are excluded: by a rule, or because it names some without a rule."""
    if shape.restricts_others:
        return shape.others != ANYTHING and any(node.schema is False for node in shape.others)
    return bool(shape.properties or shape.required)


def key_of(conjunction: Conjunction) -> tuple[str, ...]:
    """Return a key that is equal for conjunctions of the same schemas."""
    return tuple(sorted({node.where for node in conjunction}))


def both(a: Conjunction, b: Conjunction) -> Conjunction:
    """Return the schemas of both conjunctions without duplicates."""
    return tuple({node.where: node for node in (*a, *b)}.values())
