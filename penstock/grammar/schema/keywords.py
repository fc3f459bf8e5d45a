"""Functions that read and check the value of one JSON schema keyword, or compare JSON values.

The ``read_`` functions raise InputError for an invalid value, and UnsupportedSchemaError for a number or a
pattern that grammars cannot enforce.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import TypeGuard

from penstock.errors import InputError, UnsupportedSchemaError
from penstock.grammar.schema import regex
from penstock.grammar.schema.shapes import SchemaNode

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_MAX_COUNT = 1_000_000_000


def equality_key(value: object) -> object:
    """Return a hashable key that is equal for equal JSON values. 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, dict):
        return ("object", frozenset((name, equality_key(member)) for name, member in value.items()))
    if isinstance(value, list):
        return ("array", tuple(map(equality_key, value)))
    return (bool if isinstance(value, bool) else None, value)


def are_unique(values: list[object]) -> bool:
    """Return whether no two values are equal."""
    return len({equality_key(value) for value in values}) == len(values)


def is_finite(value: object) -> bool:
    """Return whether a value contains no infinity and no NaN."""
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    if isinstance(value, list):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a JSON number. The values true and false are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def to_decimal(value: int | float) -> Decimal:
    """Return a JSON number as a Decimal with the same digits."""
    return Decimal(repr(value))


def read_number(node: SchemaNode, keyword: str) -> Decimal | None:
    """Return the number of a keyword; None if the schema does not have the keyword."""
    value = node.schema.get(keyword)
    if value is None and keyword not in node.schema:
        return None
    if not is_number(value) or not is_finite(value):
        raise invalid_keyword(node, keyword, "a number")
    number = to_decimal(value)
    if len(number.as_tuple().digits) > 40 or abs(number.adjusted()) > 40:
        raise UnsupportedSchemaError(keyword, node.where, f"{value} has more than 40 digits")
    return number


def read_counts(node: SchemaNode, min_keyword: str, max_keyword: str) -> tuple[int, int | None]:
    """Return (minimum, maximum) of a count: the values of two keywords, by default 0 and None.

    A larger maximum than `_MAX_COUNT` is replaced by `_MAX_COUNT`.
    """
    return _read_count(node, min_keyword) or 0, _read_count(node, max_keyword)


def _read_count(node: SchemaNode, keyword: str) -> int | None:
    value = node.schema.get(keyword)
    if keyword not in node.schema:
        return None
    if not is_number(value) or not is_finite(value) or value != int(value) or value < 0:
        raise invalid_keyword(node, keyword, "a whole number of at least 0")
    count = int(value)
    if count > _MAX_COUNT and keyword.startswith("min"):
        raise UnsupportedSchemaError(keyword, node.where, f"{count} is more than {_MAX_COUNT}")
    return min(count, _MAX_COUNT)  # no output reaches `_MAX_COUNT`


def read_mapping(node: SchemaNode, keyword: str) -> dict[str, object]:
    """Return the object of a keyword; empty if the schema does not have the keyword."""
    value = node.schema.get(keyword, {})
    if not isinstance(value, dict):
        raise invalid_keyword(node, keyword, "an object")
    return value


def read_strings(node: SchemaNode, keyword: str, value: object) -> list[str]:
    """Return the value of a keyword that must be a list of strings."""
    if not isinstance(value, list) or not all(isinstance(member, str) for member in value):
        raise invalid_keyword(node, keyword, "an array of strings")
    return value


def read_types(node: SchemaNode) -> list[str]:
    """Return the types of the keyword ``type``; all types if the schema does not have it."""
    type_names = node.schema.get("type", list(TYPES))
    types = [type_names] if isinstance(type_names, str) else type_names
    if not isinstance(types, list) or not types or not all(isinstance(type_, str) for type_ in types):
        raise invalid_keyword(node, "type", "the name of a type or an array of them")
    if any(type_ not in TYPES for type_ in types):
        raise invalid_keyword(node, "type", f"among {', '.join(TYPES)}")
    return types


def read_pattern(node: SchemaNode) -> tuple[regex.RegexNode, list[tuple[regex.RegexNode, bool]]]:
    """Return the result of `regex.parse_pattern` for the pattern of a schema."""
    pattern = node.schema["pattern"]
    if not isinstance(pattern, str):
        raise invalid_keyword(node, "pattern", "a string")
    try:
        return regex.parse_pattern(pattern)
    except InputError as error:
        raise UnsupportedSchemaError("pattern", node.where, str(error)) from None


def read_format(node: SchemaNode) -> str:
    """Return the name of a schema's format; empty without a format."""
    name = node.schema.get("format", "")
    if not isinstance(name, str):
        raise invalid_keyword(node, "format", "a string")
    return name


def invalid_keyword(node: SchemaNode, keyword: str, allowed_values: str) -> InputError:
    """Return the error for a keyword with an invalid value."""
    value_text = repr(node.schema[keyword])
    value_text = value_text if len(value_text) <= 80 else f"{value_text[:80]}..."
    return InputError(
        f"the JSON schema keyword {keyword!r} (at {node.where}) must be {allowed_values}, was {value_text}"
    )


def escape_pointer(name: str) -> str:
    """Return a name with the escapes of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def array_index(pointer_part: str) -> int:
    """Return the array index that a part of a JSON pointer (RFC 6901) contains.

    Raises:
        IndexError: the part is not a number, or has a sign or leading zeros.
    """
    is_positive = pointer_part.isascii() and pointer_part.isdigit() and pointer_part[0] != "0"
    if pointer_part != "0" and not is_positive:
        raise IndexError(pointer_part)
    return int(pointer_part)


def read_branches(node: SchemaNode, keyword: str) -> list[SchemaNode]:
    """Return the schemas of ``allOf``, ``anyOf`` or ``oneOf``; empty if the schema does not have it."""
    branches = node.schema.get(keyword, [])
    if not isinstance(branches, list) or (keyword in node.schema and not branches):
        raise invalid_keyword(node, keyword, "an array that is not empty")
    return [SchemaNode(branch, f"{node.where}/{keyword}/{i}") for i, branch in enumerate(branches)]
