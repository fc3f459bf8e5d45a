"""What the OpenAPI document says of routes that read their bodies themselves."""

from __future__ import annotations

from typing import Any

from penstock.serve.api.parameters import accepted_values
from penstock.serve.api.schemas import RequestBody
from penstock.serve.api.validation import json_schema

_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_REASONS = {
    400: "The request cannot be served as asked; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The server was not started so that this is allowed, or a page of another site asks.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    409: "The name is in use.",
    413: "The body is too long.",
    415: "The body is not said to be JSON.",
    421: "The Host is unknown.",
    429: "Too many requests wait already; see Retry-After.",
    500: "A fault of the server ended the request.",
    503: "The model is not ready, or the request took too long; see Retry-After.",
}

OF_BODIES = (400, 401, 403, 404, 408, 413, 415, 421, 429, 500, 503)
"""What a route that takes a body may answer besides 200."""


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors that a route answers with, all of one shape."""
    content = {"application/json": {"schema": _ERROR}}
    return {status: {"description": _REASONS[status], "content": content} for status in statuses}


def body_of(kind: type[RequestBody]) -> dict[str, Any]:
    """The request body of a route, for its ``openapi_extra``."""
    schema = json_schema(kind)
    schema["properties"].update(accepted_values(kind))
    schema["additionalProperties"] = False
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def generated(description: str, *, streams: bool = True) -> dict[int | str, dict[str, Any]]:
    """All answers of a route that takes a body: 200 as JSON, perhaps also as a stream, and the errors."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {200: {"description": description, "content": content}, **responses(*OF_BODIES)}
