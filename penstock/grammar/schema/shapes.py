"""The shapes that a JSON value may have, each of one JSON type, and the keywords that none can be made of.

A value must satisfy a *conjunction* of schemas (``allOf``, ``$ref`` beside other keywords, the same property
in two schemas). `reader.Reader` multiplies it out into alternatives of shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from penstock.grammar.schema import regex
from penstock.grammar.schema.numbers import UNBOUNDED, Bounds

REFUSED = {
    "not": "what is left out cannot be told from what is let in, token by token",
    "if": "use anyOf with a const that tells the cases apart",
    "then": "use anyOf with a const that tells the cases apart",
    "else": "use anyOf with a const that tells the cases apart",
    "contains": "which item it is cannot be told in advance: describe the items with prefixItems",
    "minContains": "use minItems",
    "maxContains": "use maxItems",
    "dependencies": "use dependentRequired or dependentSchemas",
    "additionalItems": "use prefixItems and items",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
    "divisibleBy": "use multipleOf",
    "disallow": "use anyOf with the types that are let in",
    "extends": "use allOf",
}


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A schema and where it stands."""

    schema: Any
    where: str


Conjunction: TypeAlias = tuple[Node, ...]
ANYTHING: Conjunction = ()
NEVER: Conjunction = (Node(False, "#false"),)


@dataclass(frozen=True, slots=True)
class Literal:
    """One value."""

    value: Any


@dataclass(frozen=True, slots=True)
class Numeric:
    """Numbers in an interval."""

    bounds: Bounds = UNBOUNDED
    is_integer: bool = False
    multiple_of: int = 1
    said_at: str = "#"


@dataclass(frozen=True, slots=True)
class Condition:
    """What a pattern or a format says about a string."""

    tree: regex.Node
    said_by: Node = field(compare=False)
    keyword: str = field(compare=False)
    is_negated: bool = False  # whether the string must not match: a negated lookahead
    format: str | None = None  # the format, whose check of a value may accept more than the tree


@dataclass(frozen=True, slots=True)
class StringShape:
    """Strings of some length that satisfy conditions."""

    least: int = 0
    most: int | None = None
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class Array:
    """Arrays: the first items, then others."""

    prefix: tuple[Conjunction, ...] = ()
    items: Conjunction = ANYTHING
    least: int = 0
    most: int | None = None
    unique_at: Node | None = field(default=None, compare=False)  # whose uniqueItems it is

    def item(self, index: int) -> Conjunction:
        """What the item at an index must satisfy."""
        return self.prefix[index] if index < len(self.prefix) else self.items


@dataclass(frozen=True, slots=True)
class Object:
    """Objects: properties by name, and others."""

    properties: dict[str, Conjunction] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    others: Conjunction = ANYTHING
    says_others: bool = False  # whether a schema says anything about them
    names: StringShape | None = None  # how the names of the others are written
    least: int = 0
    most: int | None = None
    minimum_at: str = "#"

    def property(self, name: str) -> Conjunction:
        """What the property of a name must satisfy."""
        return self.properties.get(name, self.others)


Shape: TypeAlias = Literal | Numeric | StringShape | Array | Object


class Schemas(Protocol):
    """What shapes that hold schemas ask of the document: `reader.Reader`."""

    def shapes(self, conjunction: Conjunction) -> list[Shape]:
        """The alternatives of a conjunction; none where nothing satisfies it."""
        ...

    def accepts(self, conjunction: Conjunction, value: Any) -> bool:
        """Whether a value satisfies a conjunction."""
        ...


def is_closed(shape: Object) -> bool:
    """Whether only its own properties are written: it says so, or it names some and says nothing else."""
    if shape.says_others:
        return shape.others != ANYTHING and any(node.schema is False for node in shape.others)
    return bool(shape.properties or shape.required)


def key_of(conjunction: Conjunction) -> tuple[str, ...]:
    """Equal for conjunctions of the same schemas."""
    return tuple(sorted({node.where for node in conjunction}))


def both(a: Conjunction, b: Conjunction) -> Conjunction:
    """The schemas of both, each once."""
    return tuple({node.where: node for node in (*a, *b)}.values())
