"""Validates request bodies against their schemas, and converts validation errors to HTTP errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from penstock.serve.api.schemas import ChatMessage, RequestBody, Tool
from penstock.serve.http.problems import RequestProblem

Body = TypeVar("Body", bound=RequestBody)


def validated(body_type: type[Body], body: object) -> Body:
    """Validate a decoded body against its schema and return it. Does not check unknown fields.

    Raises:
        RequestProblem: 400; the body is not an object, has too many fields or has an invalid field. The
            message names the invalid field.
    """
    if not isinstance(body, dict):
        raise RequestProblem(400, f"the body must be a JSON object, not {_shortened(body)}")
    if len(body) > _MAX_FIELDS:  # one call of pydantic validates all fields and holds the GIL
        raise RequestProblem(400, f"the body has {len(body)} fields; the maximum is {_MAX_FIELDS}")
    try:
        return body_type.model_validate(_with_lists_validated(body_type, body))
    except ValidationError as error:
        raise _first_problem(error, body) from None


def _with_lists_validated(body_type: type[RequestBody], body: dict[str, object]) -> dict[str, object]:
    """Return the body with the elements of long lists validated.

    The elements are validated one by one, because a call of pydantic holds the GIL until it returns. A list
    with an invalid element is cut after this element. The validation of the whole body then reports the
    element.
    """
    validated_lists = {}
    for name, element_type in _LIST_TYPES.items():
        elements = body.get(name)
        if name not in body_type.model_fields or not isinstance(elements, list):
            continue
        if len(elements) > _LONG_LIST_LENGTH:
            validated_lists[name] = _validated_elements(element_type, elements)
    return {**body, **validated_lists} if validated_lists else body


def _validated_elements(element_type: type[RequestBody], raw_elements: list[object]) -> list[object]:
    elements: list[object] = []
    for element in raw_elements:
        try:
            elements.append(element_type.model_validate(element))
        except ValidationError:
            return [*elements, element]
    return elements


def _shortened(body: object) -> str:
    return json.dumps(body[:10] if isinstance(body, list | str) else body)[:40]


_MAX_FIELDS = 1000
"""Maximum number of members of the body itself. Members of nested objects do not count."""
_LIST_TYPES: Mapping[str, type[RequestBody]] = {"messages": ChatMessage, "tools": Tool}
"""Name of a field that can be a long list -> type of its elements."""
_LONG_LIST_LENGTH = 64
"""Lists with more elements are validated element by element."""


def _first_problem(error: ValidationError, body: Mapping[str, object]) -> RequestProblem:
    """Return the error of the first invalid field. For a union of types, its message joins several errors."""
    details = error.errors(include_url=False, include_context=False)
    field_paths = [_error_path(detail, body) for detail in details]
    # If no type of a union matches, the type with the deepest error location is reported.
    deepest_path = max(
        (field_path for field_path in field_paths if field_path.startswith(field_paths[0])), key=len
    )
    messages = [
        detail["msg"]
        for detail, field_path in zip(details, field_paths, strict=True)
        if field_path == deepest_path
    ]
    text = " or ".join(dict.fromkeys(_error_text(message) for message in messages))
    is_missing = details[field_paths.index(deepest_path)]["type"] == "missing"
    if is_missing:
        return RequestProblem(
            400, f"{deepest_path} is required", param=deepest_path, code="missing_required_parameter"
        )
    return RequestProblem(
        400, f"{deepest_path}: {text}" if deepest_path else text, param=deepest_path or None
    )


def _error_path(error: ErrorDetails, body: Mapping[str, object]) -> str:
    """Return the path of the invalid field, such as ``messages[0].content``.

    The path leaves out the names that pydantic gives the types of a union.
    """
    field_path, value = "", _Value(body)
    absent_key = error["loc"][-1:] if error["type"] == "missing" else ()
    for part in error["loc"]:
        if isinstance(part, int) and value.has_index(part):
            field_path, value = f"{field_path}[{part}]", value.at(part)
        elif isinstance(part, str) and (value.has_key(part) or (part,) == absent_key):
            field_path, value = f"{field_path}.{part}" if field_path else part, value.at(part)
    return field_path


class _Value:
    """A value in the body; None for a value that the body does not have."""

    def __init__(self, value: object) -> None:
        self.value = value

    def has_index(self, index: int) -> bool:
        return isinstance(self.value, list) and index < len(self.value)

    def has_key(self, key: str) -> bool:
        return isinstance(self.value, dict) and key in self.value

    def at(self, part: int | str) -> _Value:
        match self.value:
            case list() if isinstance(part, int) and part < len(self.value):
                return _Value(self.value[part])
            case dict() if part in self.value:
                return _Value(self.value[part])
        return _Value(None)


def _error_text(message: str) -> str:
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def json_schema(body_type: type[RequestBody]) -> dict[str, object]:
    """Return the JSON schema of a body for the OpenAPI document.

    Each reference is replaced by its definition. ``"additionalProperties": true`` is left out.
    """
    schema = body_type.model_json_schema()
    definitions = schema.pop("$defs", {})
    inlined_schema = _with_definitions_inlined(schema, definitions)
    assert isinstance(inlined_schema, dict)
    return inlined_schema


def _with_definitions_inlined(node: object, definitions: Mapping[str, object]) -> object:
    if isinstance(node, list):
        return [_with_definitions_inlined(element, definitions) for element in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _with_definitions_inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {
        key: _with_definitions_inlined(value, definitions) for key, value in _without_open_properties(node)
    }


def _without_open_properties(node: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    return ((key, value) for key, value in node.items() if key != "additionalProperties" or value is not True)
