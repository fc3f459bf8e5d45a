"""The tools of a request as parsers and grammars need them: names, and schemas of the arguments."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
ToolChoice = str | Mapping[str, Any] | None

_TYPES_OF_VALUES: dict[type, str] = {
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
    """The functions that may be called, by name; ``schemas[name]`` is the JSON schema of the arguments."""

    schemas: dict[str, Schema]

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]], tool_choice: ToolChoice) -> Tools:
        """Of the tools and the choice as OpenAI's requests have them, checked already: none for the choice
        ``"none"``, the named one for a choice by name."""
        if tool_choice == "none":
            return cls({})
        functions = [tool["function"] for tool in tools]
        schemas = {function["name"]: _of_object(function.get("parameters")) for function in functions}
        if isinstance(tool_choice, Mapping):
            name = tool_choice["function"]["name"]
            schemas = {name: schemas[name]}
        return cls(schemas)

    def with_strict(self, names: Container[str]) -> Tools:
        """With any arguments for those that are not among the names."""
        return Tools(
            {name: one if name in names else {"type": "object"} for name, one in self.schemas.items()}
        )

    def __contains__(self, name: object) -> bool:
        return name in self.schemas

    def __bool__(self) -> bool:
        return bool(self.schemas)

    def properties(self, name: str) -> dict[str, Schema | bool]:
        """The schemas of a tool's single arguments."""
        properties = self.schemas[name].get("properties")
        return properties if isinstance(properties, dict) else {}

    def argument_types(self, name: str, argument: str) -> frozenset[str] | None:
        """JSON's types that an argument may have; None where the schema does not say."""
        return types_of(self.properties(name).get(argument), self.schemas[name])


def types_of(schema: object, root: Schema) -> frozenset[str] | None:
    """JSON's types that a schema allows, as part of another; None where it does not say."""
    return _types(schema, root, depth=0)


def _of_object(parameters: Schema | None) -> Schema:
    """The schema of a call's arguments; a function without parameters has none."""
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
        return _types(_referenced(schema["$ref"], root), root, depth + 1)
    if "const" in schema:
        return frozenset({_TYPES_OF_VALUES[type(schema["const"])]})
    if isinstance(schema.get("enum"), list):
        return frozenset(_TYPES_OF_VALUES[type(value)] for value in schema["enum"])
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            kinds = [_types(part, root, depth + 1) for part in schema[keyword]]
            known = [kind for kind in kinds if kind is not None]
            return frozenset().union(*known) if len(known) == len(kinds) else None
    return None


def _referenced(reference: str, root: Schema) -> object:
    """What ``#/$defs/Name`` points to; None for any other place."""
    target: object = root
    steps = reference.removeprefix("#/").split("/") if reference.startswith("#/") else [""]
    for step in steps:
        target = target.get(step) if isinstance(target, dict) else None
    return target
