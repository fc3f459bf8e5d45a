"""Tests whether a value satisfies a schema.

The validator tests the values that a schema lists with `enum` or `const`, and property names. It also
evaluates keywords that grammars do not support.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import InputError, UnsupportedSchemaError
from penstock.grammar.schema import regex
from penstock.grammar.schema.formats import has_format
from penstock.grammar.schema.keywords import (
    are_unique,
    equality_key,
    escape_pointer,
    invalid_keyword,
    is_number,
    read_branches,
    read_counts,
    read_format,
    read_mapping,
    read_number,
    read_pattern,
    read_strings,
    read_types,
    to_decimal,
)
from penstock.grammar.schema.shapes import SchemaNode

_MAX_DEPTH = 100  # maximum nesting of schemas
_EVALUATED_KEYWORDS = frozenset({"not", "if", "then", "else", "contains", "minContains", "maxContains"})
# Characters that belong to the same character classes in all dialects of regular expressions.
_PORTABLE_CHARACTERS = frozenset(map(chr, range(32, 127)))


class _DialectsDifferError(Exception):
    """A value may match a pattern in ECMA 262 but not in Python, or the reverse."""


class Validator:
    """Evaluates schemas of one document.

    Args:
        resolve: returns the schema that a $ref refers to.
        refused_keywords: keyword that grammars do not support -> reason. Keywords that this class evaluates
            are accepted.
    """

    def __init__(self, resolve: Callable[[SchemaNode], SchemaNode], refused_keywords: dict[str, str]) -> None:
        self._resolve = resolve
        self._refused_keywords = {
            keyword: reason
            for keyword, reason in refused_keywords.items()
            if keyword not in _EVALUATED_KEYWORDS
        }
        self._enum_keys: dict[str, frozenset[object]] = {}
        self._patterns: dict[str, tuple[regex.RegexNode, list[tuple[regex.RegexNode, bool]]]] = {}
        self._depth = 0

    def accepts(self, node: SchemaNode, value: object) -> bool:
        """Return whether a value satisfies a schema; False if the result may depend on the regex dialect.

        Raises:
            UnsupportedSchemaError: a keyword is not supported, or schemas are nested too deeply.
            InputError: a schema is malformed.
        """
        try:
            return self._satisfies(node, value)
        except _DialectsDifferError:
            return False
        finally:
            self._depth = 0

    def _satisfies(self, node: SchemaNode, value: object) -> bool:
        schema = node.schema
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise InputError(f"the JSON schema at {node.where} is {schema!r}, not an object, true or false")
        for keyword, reason in self._refused_keywords.items():
            if keyword in schema:
                raise UnsupportedSchemaError(keyword, node.where, reason)
        if "$id" in schema and node.where != "#":
            raise UnsupportedSchemaError("$id", node.where, "only the outermost schema may have one")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnsupportedSchemaError("$ref", node.where, f"more than {_MAX_DEPTH} nested schemas")
        try:
            return (
                _has_type(node, value)
                and self._matches_enum(node, value)
                and self._satisfies_type_keywords(node, value)
                and self._satisfies_nested_schemas(node, value)
            )
        finally:
            self._depth -= 1

    def _satisfies_type_keywords(self, node: SchemaNode, value: object) -> bool:
        """Return whether a value satisfies the keywords for its type."""
        if is_number(value):
            return _is_in_range(node, value)
        if isinstance(value, str):
            return self._satisfies_string_keywords(node, value)
        if isinstance(value, list):
            return self._satisfies_array_keywords(node, value)
        return not isinstance(value, dict) or self._satisfies_object_keywords(node, value)

    def _matches_enum(self, node: SchemaNode, value: object) -> bool:
        schema = node.schema
        if "const" in schema and equality_key(schema["const"]) != equality_key(value):
            return False
        if "enum" not in schema:
            return True
        if node.where not in self._enum_keys:
            if not isinstance(schema["enum"], list):
                raise invalid_keyword(node, "enum", "an array")
            self._enum_keys[node.where] = frozenset(map(equality_key, schema["enum"]))
        return equality_key(value) in self._enum_keys[node.where]

    def _satisfies_string_keywords(self, node: SchemaNode, value: str) -> bool:
        if not _is_between(len(value), read_counts(node, "minLength", "maxLength")):
            return False
        if "pattern" in node.schema and not self._matches(node, value):
            return False
        return has_format(read_format(node), value)

    def _matches(self, node: SchemaNode, value: str) -> bool:
        """Return whether a text matches the pattern of a schema.

        Raises:
            _DialectsDifferError: the result may depend on the dialect of regular expressions.
        """
        pattern = node.schema["pattern"]
        if not isinstance(pattern, str) or pattern not in self._patterns:
            self._patterns[pattern if isinstance(pattern, str) else ""] = read_pattern(node)
        tree, lookaheads = self._patterns[pattern]
        is_match = regex.matches(tree, value) and all(
            regex.matches(lookahead, value) != is_negated for lookahead, is_negated in lookaheads
        )
        if not is_match and not set(value) <= _PORTABLE_CHARACTERS and ("\\" in pattern or "." in pattern):
            raise _DialectsDifferError
        return is_match

    def _satisfies_array_keywords(self, node: SchemaNode, value: list[object]) -> bool:
        schema = node.schema
        if not _is_between(len(value), read_counts(node, "minItems", "maxItems")):
            return False
        if schema.get("uniqueItems", False) is not False and not are_unique(value):
            return False
        prefix = schema.get("prefixItems", [])
        if not isinstance(prefix, list):
            raise invalid_keyword(node, "prefixItems", "an array")
        if isinstance(schema.get("items"), list):
            reason = "an array of schemas is the syntax of older drafts: use prefixItems"
            raise UnsupportedSchemaError("items", node.where, reason)
        other_items = schema["items"] if "items" in schema else _allows_unevaluated(node, "unevaluatedItems")
        item_schemas = [
            _subschema(node, f"prefixItems/{i}", prefix_schema) for i, prefix_schema in enumerate(prefix)
        ]
        item_schemas += [_subschema(node, "items", other_items)] * (len(value) - len(item_schemas))
        if not all(
            self._satisfies(item_schema, item) for item_schema, item in zip(item_schemas, value, strict=False)
        ):
            return False
        if "contains" not in schema:
            return True
        min_count, max_count = read_counts(node, "minContains", "maxContains")
        count = sum(self._satisfies(_subschema(node, "contains", schema["contains"]), item) for item in value)
        return _is_between(count, (min_count if "minContains" in schema else 1, max_count))

    def _satisfies_object_keywords(self, node: SchemaNode, value: dict[str, object]) -> bool:
        schema = node.schema
        if not _is_between(len(value), read_counts(node, "minProperties", "maxProperties")):
            return False
        if not set(read_strings(node, "required", schema.get("required", []))) <= value.keys():
            return False
        for name, names in read_mapping(node, "dependentRequired").items():
            if name in value and not set(read_strings(node, "dependentRequired", names)) <= value.keys():
                return False
        for name, dependent in read_mapping(node, "dependentSchemas").items():
            if name in value and not self._satisfies(
                _subschema(node, f"dependentSchemas/{escape_pointer(name)}", dependent), value
            ):
                return False
        return all(self._satisfies_property_schemas(node, name, member) for name, member in value.items())

    def _satisfies_property_schemas(self, node: SchemaNode, name: str, value: object) -> bool:
        schema = node.schema
        subschemas = []
        properties = read_mapping(node, "properties")
        if name in properties:
            subschemas.append(_subschema(node, f"properties/{escape_pointer(name)}", properties[name]))
        for pattern, pattern_schema in read_mapping(node, "patternProperties").items():
            where = f"patternProperties/{escape_pointer(pattern)}"
            if self._matches(_subschema(node, where, {"pattern": pattern}), name):
                subschemas.append(_subschema(node, where, pattern_schema))
        if not subschemas:
            has_additional_schema = "additionalProperties" in schema
            additional_schema = (
                schema["additionalProperties"]
                if has_additional_schema
                else _allows_unevaluated(node, "unevaluatedProperties")
            )
            subschemas.append(_subschema(node, "additionalProperties", additional_schema))
        if "propertyNames" in schema and not self._satisfies(
            _subschema(node, "propertyNames", schema["propertyNames"]), name
        ):
            return False
        return all(self._satisfies(subschema, value) for subschema in subschemas)

    def _satisfies_nested_schemas(self, node: SchemaNode, value: object) -> bool:
        """Return whether a value satisfies keywords such as ``allOf``, whose schemas apply to the value."""
        schema = node.schema
        if "$ref" in schema and not self._satisfies(self._resolve(node), value):
            return False
        if not all(self._satisfies(branch, value) for branch in read_branches(node, "allOf")):
            return False
        if "anyOf" in schema and not any(
            self._satisfies(branch, value) for branch in read_branches(node, "anyOf")
        ):
            return False
        if "oneOf" in schema:
            branches = read_branches(node, "oneOf")
            if sum(self._satisfies(branch, value) for branch in branches) != 1:
                return False
        if "not" in schema and self._satisfies(_subschema(node, "not", schema["not"]), value):
            return False
        if "if" not in schema:
            return True
        keyword = "then" if self._satisfies(_subschema(node, "if", schema["if"]), value) else "else"
        return keyword not in schema or self._satisfies(_subschema(node, keyword, schema[keyword]), value)


def _subschema(node: SchemaNode, path: str, schema: object) -> SchemaNode:
    return SchemaNode(schema, f"{node.where}/{path}")


def _is_between(count: int, bounds: tuple[int, int | None]) -> bool:
    return bounds[0] <= count and (bounds[1] is None or count <= bounds[1])


def _has_type(node: SchemaNode, value: object) -> bool:
    type_names = {  # JSON types of each Python type
        type(None): ("null",),
        bool: ("boolean",),
        str: ("string",),
        list: ("array",),
        dict: ("object",),
        int: ("integer", "number"),
        float: ("integer", "number") if isinstance(value, float) and value.is_integer() else ("number",),
    }
    types = read_types(node)
    return any(name in types for name in type_names[type(value)])


def _is_in_range(node: SchemaNode, value: int | float) -> bool:
    number = to_decimal(value)
    low, high = read_number(node, "minimum"), read_number(node, "maximum")
    exclusive_low, exclusive_high = (
        read_number(node, "exclusiveMinimum"),
        read_number(node, "exclusiveMaximum"),
    )
    if (low is not None and number < low) or (high is not None and number > high):
        return False
    if (exclusive_low is not None and number <= exclusive_low) or (
        exclusive_high is not None and number >= exclusive_high
    ):
        return False
    factor = read_number(node, "multipleOf")
    if factor is None:
        return True
    if factor <= 0:
        raise invalid_keyword(node, "multipleOf", "a number greater than 0")
    numerator, denominator = number.as_integer_ratio()
    factor_numerator, factor_denominator = factor.as_integer_ratio()
    return numerator * factor_denominator % (denominator * factor_numerator) == 0


def _allows_unevaluated(node: SchemaNode, keyword: str) -> bool:
    """Return the value of an ``unevaluated...`` keyword; True if it is absent.

    Raises:
        UnsupportedSchemaError: the value is neither true nor false, or it is false next to a keyword with
            other schemas for the same value, such as ``allOf``.
    """
    allows = node.schema.get(keyword, True)
    applicators = ("$ref", "allOf", "anyOf", "oneOf", "dependentSchemas", "if")
    if allows is not True and (
        allows is not False or any(applicator in node.schema for applicator in applicators)
    ):
        raise UnsupportedSchemaError(
            keyword, node.where, "only true and false are supported, without other schemas"
        )
    return allows is True
