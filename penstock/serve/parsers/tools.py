"""The tools of a request: names and argument schemas."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from penstock.pipelines.core import TokenGeneratorRequestTool

Schema = dict[str, Any]


class ChosenFunction(TypedDict):
    """The function that a request chooses."""

    name: str


class NamedFunction(TypedDict):
    """A choice of one function, as an object of the OpenAI API."""

    type: str
    function: ChosenFunction


ToolChoice = str | NamedFunction | None

_JSON_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}


@dataclass(frozen=True)
class Tools:
    """The tools that the model may call: name -> JSON schema of the arguments."""

    schemas: dict[str, Schema]

    @classmethod
    def from_request(cls, tools: Sequence[TokenGeneratorRequestTool], tool_choice: ToolChoice) -> Tools:
        """Return the callable tools, given validated ``tools`` and ``tool_choice`` of the OpenAI API.

        With the choice ``"none"`` no tool is callable. With a named choice only the named tool is callable.
        """
        if tool_choice == "none":
            return cls({})
        functions = [tool["function"] for tool in tools]
        schemas = {function["name"]: _object_schema(function.get("parameters")) for function in functions}
        if isinstance(tool_choice, dict):
            name = tool_choice["function"]["name"]
            schemas = {name: schemas[name]}
        return cls(schemas)

    def with_strict(self, names: Container[str]) -> Tools:
        """Return a copy in which tools that are not in `names` accept any arguments."""
        return Tools(
            {name: schema if name in names else {"type": "object"} for name, schema in self.schemas.items()}
        )

    def __contains__(self, name: object) -> bool:
        return name in self.schemas

    def __bool__(self) -> bool:
        return bool(self.schemas)

    def properties(self, name: str) -> dict[str, Schema | bool]:
        """Return the schema of each argument of a tool; empty if the tool's schema names no arguments."""
        properties = self.schemas[name].get("properties")
        return properties if isinstance(properties, dict) else {}

    def argument_types(self, name: str, argument: str) -> frozenset[str] | None:
        """Return the JSON types that an argument may have; None if the schema does not restrict them."""
        return types_of(self.properties(name).get(argument), self.schemas[name])


def types_of(schema: object, root: Schema) -> frozenset[str] | None:
    """Return the JSON types that a subschema of `root` allows; None if all are allowed or if unknown."""
    return _types(schema, root, depth=0)


def _object_schema(parameters: Schema | None) -> Schema:
    """Return the schema of the arguments object.

    If ``properties`` or ``parameters`` is empty, the schema allows no arguments, unless it has
    ``additionalProperties`` or ``patternProperties``.
    """
    schema = {"type": "object", **(parameters or {"properties": {}})}
    if schema.get("properties") == {} and not {"additionalProperties", "patternProperties"} & schema.keys():
        schema["additionalProperties"] = False
    return schema


def _types(schema: object, root: Schema, depth: int) -> frozenset[str] | None:
    if not isinstance(schema, dict) or depth > 8:
        return None
    if isinstance(schema.get("type"), str):
        return frozenset({schema["type"]})
    if isinstance(schema.get("type"), list):
        return frozenset(filter(lambda name: isinstance(name, str), schema["type"]))
    if isinstance(schema.get("$ref"), str):
        return _types(_reference_target(schema["$ref"], root), root, depth + 1)
    if "const" in schema:
        return frozenset({_JSON_TYPES[type(schema["const"])]})
    if isinstance(schema.get("enum"), list):
        return frozenset(_JSON_TYPES[type(value)] for value in schema["enum"])
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            part_types = [_types(part, root, depth + 1) for part in schema[keyword]]
            known_types = [types for types in part_types if types is not None]
            return frozenset().union(*known_types) if len(known_types) == len(part_types) else None
    return None


def _reference_target(reference: str, root: Schema) -> object:
    """Resolve a reference such as ``#/$defs/Name``; return None for other or unknown references."""
    target: object = root
    steps = reference.removeprefix("#/").split("/") if reference.startswith("#/") else [""]
    for step in steps:
        target = target.get(step) if isinstance(target, dict) else None
    return target
