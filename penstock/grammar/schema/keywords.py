"""Single keywords of a JSON schema: their values, checked, and how JSON values compare."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from penstock.errors import InputError, UnsupportedSchemaError
from penstock.grammar.schema import regex
from penstock.grammar.schema.shapes import Node

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_MAX_COUNT = 1_000_000_000


def identity(value: Any) -> Any:
    """Equal for values that JSON schema calls equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        return ("object", frozenset((name, identity(one)) for name, one in value.items()))
    if isinstance(value, list):
        return ("array", tuple(map(identity, value)))
    return (bool if isinstance(value, bool) else None, value)


def are_unique(values: list[Any]) -> bool:
    """Whether no two values are equal."""
    return len({identity(value) for value in values}) == len(values)


def is_finite(value: Any) -> bool:
    """Whether a value has no float that JSON cannot write."""
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    if isinstance(value, list):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def is_number(value: Any) -> bool:
    """Whether a value is a JSON number: true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def decimal_of(value: int | float) -> Decimal:
    """A number as it is written."""
    return Decimal(repr(value))


def number_of(node: Node, keyword: str) -> Decimal | None:
    """The number that a keyword has; None without the keyword."""
    value = node.schema.get(keyword)
    if value is None and keyword not in node.schema:
        return None
    if not is_number(value) or not is_finite(value):
        raise wrong(node, keyword, "a number")
    number = decimal_of(value)
    if len(number.as_tuple().digits) > 40 or abs(number.adjusted()) > 40:
        raise UnsupportedSchemaError(keyword, node.where, f"{value} has more than 40 digits")
    return number


def counts_of(node: Node, least: str, most: str) -> tuple[int, int | None]:
    """The bounds that two keywords set to a number of things."""
    low, high = _count(node, least), _count(node, most)
    return low or 0, high


def _count(node: Node, keyword: str) -> int | None:
    value = node.schema.get(keyword)
    if keyword not in node.schema:
        return None
    if not is_number(value) or not is_finite(value) or value != int(value) or value < 0:
        raise wrong(node, keyword, "a whole number of at least 0")
    count = int(value)
    if count > _MAX_COUNT and keyword.startswith("min"):
        raise UnsupportedSchemaError(keyword, node.where, f"{count} is more than {_MAX_COUNT}")
    return min(count, _MAX_COUNT)  # no output is as long as that


def mapping_of(node: Node, keyword: str) -> dict[str, Any]:
    """The object that a keyword has; empty without the keyword."""
    value = node.schema.get(keyword, {})
    if not isinstance(value, dict):
        raise wrong(node, keyword, "an object")
    return value


def strings_of(node: Node, keyword: str, value: Any) -> list[str]:
    """The value that a keyword has, which must be strings."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise wrong(node, keyword, "an array of strings")
    return value


def types_of(node: Node) -> list[str]:
    """The types that a schema lets in."""
    given = node.schema.get("type", list(TYPES))
    types = [given] if isinstance(given, str) else given
    if not isinstance(types, list) or not types or not all(isinstance(one, str) for one in types):
        raise wrong(node, "type", "the name of a type or an array of them")
    if any(one not in TYPES for one in types):
        raise wrong(node, "type", f"among {', '.join(TYPES)}")
    return types


def pattern_of(node: Node) -> tuple[regex.Node, list[tuple[regex.Node, bool]]]:
    """What the pattern of a schema matches, and its lookaheads as `regex.parse_pattern` gives them."""
    pattern = node.schema["pattern"]
    if not isinstance(pattern, str):
        raise wrong(node, "pattern", "a string")
    try:
        return regex.parse_pattern(pattern)
    except InputError as error:
        raise UnsupportedSchemaError("pattern", node.where, str(error)) from None


def format_of(node: Node) -> str:
    """The name of a schema's format; empty without one."""
    name = node.schema.get("format", "")
    if not isinstance(name, str):
        raise wrong(node, "format", "a string")
    return name


def wrong(node: Node, keyword: str, legal: str) -> InputError:
    """The error of a keyword whose value is not what it can be."""
    shown = repr(node.schema[keyword])
    shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
    return InputError(f"the JSON schema keyword {keyword!r} (at {node.where}) must be {legal}, was {shown}")


def escaped(name: str) -> str:
    """A name as a part of a pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def array_index(name: str) -> int:
    """A part of a pointer as the index of an array: no sign, no leading zeros (RFC 6901)."""
    if name != "0" and not (name.isascii() and name.isdigit() and name[0] != "0"):
        raise IndexError(name)
    return int(name)


def branches_of(node: Node, keyword: str) -> list[Node]:
    """The schemas of ``allOf``, ``anyOf`` or ``oneOf``; none without the keyword."""
    branches = node.schema.get(keyword, [])
    if not isinstance(branches, list) or (keyword in node.schema and not branches):
        raise wrong(node, keyword, "an array that is not empty")
    return [Node(branch, f"{node.where}/{keyword}/{i}") for i, branch in enumerate(branches)]
