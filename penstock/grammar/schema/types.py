"""Reads the types that a schema allows, and the keywords of each type."""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import UnsupportedSchemaError
from penstock.grammar.schema import formats
from penstock.grammar.schema.intersections import has_shape
from penstock.grammar.schema.keywords import (
    escape_pointer,
    invalid_keyword,
    read_counts,
    read_format,
    read_mapping,
    read_number,
    read_pattern,
    read_strings,
    read_types,
)
from penstock.grammar.schema.numbers import Bounds
from penstock.grammar.schema.shapes import (
    ANYTHING,
    NEVER,
    Array,
    Condition,
    Conjunction,
    Literal,
    Numeric,
    Object,
    SchemaNode,
    Schemas,
    Shape,
    StringShape,
)

# Keywords whose schemas apply to the same value as the schema that has the keyword.
_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "dependentSchemas", "dependentRequired")


def all_types() -> list[Shape]:
    """Return the shapes of the empty schema, which allows every value."""
    return [Literal(None), Literal(True), Literal(False), Numeric(), StringShape(), Array(), Object()]


def typed_shapes(schemas: Schemas, node: SchemaNode, is_older_draft: bool) -> list[Shape]:
    """Return the shapes of each type that a schema allows, restricted by the keywords of the type.

    Args:
        schemas: reads nested schemas.
        node: the schema.
        is_older_draft: whether the document uses a draft before 2020-12.
    """
    types = read_types(node)
    shapes: list[Shape] = []
    if "null" in types:
        shapes.append(Literal(None))
    if "boolean" in types:
        shapes += [Literal(True), Literal(False)]
    if "number" in types or "integer" in types:
        shapes.append(_numeric(node, is_integer="number" not in types))
    if "string" in types:
        shapes.append(_string(node))
    if "array" in types:
        shapes.append(_array(node, is_older_draft))
    if "object" in types:
        shapes.append(_object(schemas, node))
    return shapes


def _numeric(node: SchemaNode, is_integer: bool) -> Numeric:
    numbers = {
        keyword: read_number(node, keyword)
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    }
    bounds = Bounds(numbers["minimum"], numbers["maximum"]).intersection(
        Bounds(numbers["exclusiveMinimum"], numbers["exclusiveMaximum"], True, True)
    )
    factor = numbers["multipleOf"]
    if factor is None:
        return Numeric(bounds, is_integer)
    if factor != int(factor) or factor <= 0:
        raise UnsupportedSchemaError(
            "multipleOf", node.where, f"only whole numbers of at least 1 are supported, was {factor}"
        )
    return Numeric(bounds, True, int(factor), node.where)


def _string(node: SchemaNode) -> StringShape:
    min_count, max_count = read_counts(node, "minLength", "maxLength")
    conditions: list[Condition] = []
    pattern = node.schema.get("pattern")
    if pattern is not None:
        tree, lookaheads = read_pattern(node)
        conditions.append(Condition(tree, node, "pattern"))
        conditions += [
            Condition(lookahead, node, "pattern", is_negated) for lookahead, is_negated in lookaheads
        ]
    name = read_format(node)
    if name in formats.UNSUPPORTED_FORMATS:
        supported_formats = ", ".join(formats.SUPPORTED_FORMATS)
        reason = f"{name!r} needs enum or const; a grammar can express {supported_formats}"
        raise UnsupportedSchemaError("format", node.where, reason)
    if name in formats.SUPPORTED_FORMATS:
        conditions.append(Condition(formats.format_tree(name), node, "format", format=name))
    return StringShape(min_count, max_count, tuple(conditions))


def _array(node: SchemaNode, is_older_draft: bool) -> Array:
    schema = node.schema
    is_unique = schema.get("uniqueItems", False)
    if not isinstance(is_unique, bool):
        raise invalid_keyword(node, "uniqueItems", "true or false")
    min_count, max_count = read_counts(node, "minItems", "maxItems")
    if "prefixItems" in schema and is_older_draft:
        reason = "the draft in $schema does not define it: use draft 2020-12"
        raise UnsupportedSchemaError("prefixItems", node.where, reason)
    prefix_schemas = schema.get("prefixItems", [])
    if not isinstance(prefix_schemas, list):
        raise invalid_keyword(node, "prefixItems", "an array")
    prefix = tuple(
        (SchemaNode(item_schema, f"{node.where}/prefixItems/{i}"),)
        for i, item_schema in enumerate(prefix_schemas)
    )
    items = ANYTHING
    if isinstance(schema.get("items"), list):
        reason = "an array of schemas is the syntax of older drafts: use prefixItems"
        raise UnsupportedSchemaError("items", node.where, reason)
    if "items" in schema:
        items = (SchemaNode(schema["items"], f"{node.where}/items"),)
    elif _forbids_unevaluated(node, "unevaluatedItems"):
        items = NEVER
    return Array(prefix, items, min_count, max_count, node if is_unique else None)


def _object(schemas: Schemas, node: SchemaNode) -> Object:
    schema = node.schema
    properties: dict[str, Conjunction] = {
        name: (SchemaNode(property_schema, f"{node.where}/properties/{escape_pointer(name)}"),)
        for name, property_schema in read_mapping(node, "properties").items()
    }
    required = frozenset(read_strings(node, "required", schema.get("required", [])))
    min_count, max_count = read_counts(node, "minProperties", "maxProperties")
    additional_schemas, restricts_additional, name_schema = ANYTHING, False, None
    if "additionalProperties" in schema:
        additional_schemas = (
            SchemaNode(schema["additionalProperties"], f"{node.where}/additionalProperties"),
        )
        restricts_additional = True
    elif _forbids_unevaluated(node, "unevaluatedProperties"):
        additional_schemas, restricts_additional = NEVER, True
    object_shape = Object(
        properties,
        required,
        additional_schemas,
        restricts_additional,
        name_schema,
        min_count,
        max_count,
        node.where,
    )
    object_shape = _with_pattern_properties(schemas, node, object_shape)
    return _with_property_names(schemas, node, object_shape)


def _forbids_unevaluated(node: SchemaNode, keyword: str) -> bool:
    """Return whether an ``unevaluated...`` keyword is false, which excludes all other items or properties."""
    if node.schema.get(keyword, True) is True:
        return False
    if node.schema[keyword] is not False:
        raise UnsupportedSchemaError(keyword, node.where, "only true and false are supported")
    if any(applicator in node.schema for applicator in _APPLICATORS):
        reason = f"not together with {', '.join(_APPLICATORS)}: set it in each branch"
        raise UnsupportedSchemaError(keyword, node.where, reason)
    return True


def _with_pattern_properties(schemas: Schemas, node: SchemaNode, object_shape: Object) -> Object:
    patterns = read_mapping(node, "patternProperties")
    if not patterns:
        return object_shape

    def unsupported_pattern(reason: str) -> UnsupportedSchemaError:
        return UnsupportedSchemaError("patternProperties", node.where, reason)

    if len(patterns) > 1:
        raise unsupported_pattern("with more than one pattern, as a name may match several")
    ((pattern, pattern_schema),) = patterns.items()
    if object_shape.restricts_additional and schemas.shapes(object_shape.additional_properties):
        raise unsupported_pattern("only where additionalProperties is false or absent")
    names = _string(SchemaNode({"pattern": pattern}, f"{node.where}/patternProperties"))
    for name in {*object_shape.properties, *object_shape.required}:
        if has_shape(schemas, names, name):
            raise unsupported_pattern(f"the property {name!r} matches the pattern {pattern!r} too")
    additional_properties = (
        SchemaNode(pattern_schema, f"{node.where}/patternProperties/{escape_pointer(pattern)}"),
    )
    properties = object_shape.properties
    if not object_shape.restricts_additional:
        # Names that do not match the pattern stay allowed. Required names must therefore become named
        # properties.
        unnamed_properties = sorted(object_shape.required - properties.keys())
        properties = properties | dict.fromkeys(unnamed_properties, ANYTHING)
    return replace(
        object_shape,
        properties=properties,
        additional_properties=additional_properties,
        restricts_additional=True,
        names=names,
    )


def _with_property_names(schemas: Schemas, node: SchemaNode, object_shape: Object) -> Object:
    if "propertyNames" not in node.schema:
        return object_shape
    names = (SchemaNode(node.schema["propertyNames"], f"{node.where}/propertyNames"),)
    if object_shape.names is not None:
        raise UnsupportedSchemaError("propertyNames", node.where, "not together with patternProperties")
    name_shapes = [
        shape
        for shape in schemas.shapes(names)
        if isinstance(shape, StringShape) or (isinstance(shape, Literal) and isinstance(shape.value, str))
    ]
    properties = {
        name: conjunction if schemas.accepts(names, name) else NEVER
        for name, conjunction in object_shape.properties.items()
    }
    if not any(isinstance(shape, StringShape) for shape in name_shapes):
        allowed_names = [
            shape.value
            for shape in name_shapes
            if isinstance(shape, Literal) and isinstance(shape.value, str)
        ]
        properties |= {
            name: properties.get(name, object_shape.additional_properties) for name in allowed_names
        }
        return replace(
            object_shape, properties=properties, additional_properties=NEVER, restricts_additional=True
        )
    if object_shape.restricts_additional and not schemas.shapes(object_shape.additional_properties):
        return replace(object_shape, properties=properties)
    if len(name_shapes) > 1 or object_shape.properties or object_shape.required:
        reason = "only without properties and required, or with names listed by enum"
        raise UnsupportedSchemaError("propertyNames", node.where, reason)
    assert isinstance(name_shapes[0], StringShape)
    return replace(object_shape, restricts_additional=True, names=name_shapes[0])
