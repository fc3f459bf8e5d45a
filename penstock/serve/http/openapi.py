"""OpenAPI descriptions of request bodies that FastAPI does not read, and of error responses."""

from __future__ import annotations

from typing import TypedDict

from starlette.responses import Response

from penstock.serve.api.parameters import accepted_values
from penstock.serve.api.schemas import RequestBody
from penstock.serve.api.validation import json_schema

_ERROR: dict[str, object] = {
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
    400: "The request is invalid or not supported; `param` is the field, or null.",
    401: "The API key is missing or wrong.",
    403: "The server's options do not allow the request, or a page of another site sent the request.",
    404: "The model, or another object that the request names, does not exist.",
    408: "The body did not arrive in time.",
    409: "The name is in use.",
    413: "The body is too long.",
    415: "The content type of the body is not JSON.",
    421: "The Host header names an unknown host.",
    429: "The server is overloaded, for example because the queue is full; see Retry-After.",
    500: "An internal error ended the request.",
    503: "The model is not ready, or the request took too long; see Retry-After.",
}

BODY_ERRORS = (400, 401, 403, 404, 408, 413, 415, 421, 429, 500, 503)
"""The error statuses of a route with a request body."""


def responses(*statuses: int) -> dict[int | str, dict[str, object]]:
    """Return FastAPI's argument ``responses`` for error statuses."""
    content = {"application/json": {"schema": _ERROR}}
    return {status: {"description": _REASONS[status], "content": content} for status in statuses}


def request_body(body_class: type[RequestBody]) -> dict[str, object]:
    """Return FastAPI's argument ``openapi_extra`` for a route whose request body has this class."""
    schema = json_schema(body_class)
    properties = schema["properties"]
    assert isinstance(properties, dict)
    properties.update(accepted_values(body_class))
    schema["additionalProperties"] = False
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class RouteOptions(TypedDict):
    """Arguments of FastAPI's route decorators for a route whose handler reads the body."""

    response_class: type[Response]
    openapi_extra: dict[str, object]
    responses: dict[int | str, dict[str, object]]


def route_options(body_class: type[RequestBody], description: str, *, streams: bool = True) -> RouteOptions:
    """Return the arguments of a route whose request body has this class.

    Args:
        body_class: the class of the request body.
        description: the description of the response with status 200.
        streams: whether the response can also be a stream of server-sent events.
    """
    return {
        "response_class": Response,
        "openapi_extra": request_body(body_class),
        "responses": body_responses(description, streams=streams),
    }


def body_responses(description: str, *, streams: bool = True) -> dict[int | str, dict[str, object]]:
    """Return FastAPI's argument ``responses`` for a route with a body: status 200 and `BODY_ERRORS`."""
    content: dict[str, object] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {200: {"description": description, "content": content}, **responses(*BODY_ERRORS)}
