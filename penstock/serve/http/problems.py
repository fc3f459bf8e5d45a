"""Error responses. One table maps exception classes to status, type and code.

Error responses have OpenAI's format, ``{"error": {"message", "type", "param", "code"}}``, whatever component
raised the exception. Only the routes of Anthropic's and Ollama's APIs use the error format of their API.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

from penstock.errors import (
    CheckpointError,
    ConfigError,
    ForkedProcessError,
    InputError,
    InsufficientBlocksError,
    InsufficientMemoryError,
    MissingDependencyError,
    OverloadedError,
    PenstockError,
    PromptTooLongError,
    RequestFailedError,
    TaskMismatchError,
    UnavailableError,
    UnknownModelError,
    UnsupportedFeatureError,
    UnsupportedSchemaError,
)
from penstock.serve.observability.request_record import RequestRecord

_log = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"

ERROR_TABLE: Mapping[type[PenstockError], tuple[int, str, str | None]] = {
    PromptTooLongError: (400, INVALID_REQUEST, "context_length_exceeded"),
    UnknownModelError: (404, INVALID_REQUEST, "model_not_found"),
    TaskMismatchError: (400, INVALID_REQUEST, "unsupported_task"),
    UnsupportedSchemaError: (400, INVALID_REQUEST, "unsupported_schema"),
    UnsupportedFeatureError: (400, INVALID_REQUEST, "unsupported_value"),
    InputError: (400, INVALID_REQUEST, None),
    CheckpointError: (400, INVALID_REQUEST, "invalid_path"),  # the checkpoint of an adapter
    ConfigError: (400, INVALID_REQUEST, "invalid_value"),
    MissingDependencyError: (400, INVALID_REQUEST, "unsupported_value"),
    OverloadedError: (429, "rate_limit_error", "rate_limit_exceeded"),
    UnavailableError: (503, "service_unavailable_error", "service_unavailable"),
    InsufficientMemoryError: (503, "service_unavailable_error", "insufficient_memory"),
    ForkedProcessError: (500, "server_error", "internal_error"),
    RequestFailedError: (500, "server_error", "internal_error"),
    PenstockError: (500, "server_error", "internal_error"),
}
"""Exception class -> status, OpenAI's ``type`` and ``code``.

A subclass without an entry has the entry of its nearest base class.
"""

_HTTP_ERRORS: Mapping[int, tuple[str, str | None]] = {
    401: ("authentication_error", "invalid_api_key"),
    403: (INVALID_REQUEST, "forbidden"),
    404: (INVALID_REQUEST, "not_found"),
    405: (INVALID_REQUEST, "method_not_allowed"),
    408: (INVALID_REQUEST, "request_timeout"),
    413: (INVALID_REQUEST, "request_too_large"),
    415: (INVALID_REQUEST, "unsupported_media_type"),
    421: (INVALID_REQUEST, "unknown_host"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    503: ("service_unavailable_error", "service_unavailable"),
}
"""Status -> OpenAI's ``type`` and ``code``, for `RequestProblem` and Starlette's ``HTTPException``."""


class RequestProblem(HTTPException):
    """An error of a request that the HTTP layer or a route raises.

    Args:
        status: the status code.
        message: the cause of the error and the remedy, for the client.
        param: the invalid field, for example ``messages[0].content``.
        code: OpenAI's ``code``. Default: the code for the status in `_HTTP_ERRORS`.
        type: OpenAI's ``type``. Default: the type for the status in `_HTTP_ERRORS`.
        headers: additional headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.message = message
        self.param = param
        self.code = code
        self.type = type


@dataclass(frozen=True)
class Problem:
    """An error response."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, object]:
        """The response body in OpenAI's format, also the data of a stream's error event."""
        members = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": members}

    def encode(self) -> bytes:
        """Return `body` as JSON. Unpaired surrogates are escaped."""
        return msgspec.json.encode(self.without_surrogates().body)

    def without_surrogates(self) -> Problem:
        """Return the problem with escapes for unpaired surrogates, which UTF-8 cannot encode."""
        escaped_message = self.message.encode("utf-8", "backslashreplace").decode()
        param = self.param and self.param.encode("utf-8", "backslashreplace").decode()
        return replace(self, message=escaped_message, param=param)

    def response(self, path: str = "", request_id: str = "") -> Response:
        """Return the HTTP response to a request for `path`, in the error format of the path's API.

        Args:
            path: the path of the request.
            request_id: the request's id. Bodies in OpenAI's format do not contain the id.
        """
        format_error = next((f for prefix, f in _ERROR_FORMATS.items() if path.startswith(prefix)), None)
        if format_error is None:
            data = self.encode()
        else:
            data = msgspec.json.encode(format_error(self) | {"request_id": request_id})
        return Response(data, self.status, dict(self.headers), media_type="application/json")


def anthropic_error(problem: Problem) -> dict[str, object]:
    """Return an error in Anthropic's format, also the data of a stream's error event."""
    type_ = _ANTHROPIC_TYPES.get(problem.status, INVALID_REQUEST if problem.status < 500 else "api_error")
    return {"type": "error", "error": {"type": type_, "message": problem.without_surrogates().message}}


def ollama_error(problem: Problem) -> dict[str, object]:
    """Return an error in Ollama's format, also the last line of a stream that fails."""
    return {"error": problem.without_surrogates().message}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_ERROR_FORMATS: Mapping[str, Callable[[Problem], dict[str, object]]] = {
    "/v1/messages": anthropic_error,
    "/api/": ollama_error,
}
"""Path prefix -> function that returns an error in the API's format. Other paths have OpenAI's format."""


def problem_of(error: BaseException) -> Problem:
    """Return the error response for an exception. Unexpected exceptions give a 500 without details."""
    if isinstance(error, RequestProblem):
        type_, code = _HTTP_ERRORS.get(error.status_code, (INVALID_REQUEST, None))
        return Problem(
            error.status_code,
            error.message,
            error.type or type_,
            error.code or code,
            error.param,
            _with_retry_after(error.status_code, error.headers or {}),
        )
    if isinstance(error, HTTPException):
        return _framework_problem(error.status_code, str(error.detail), error.headers or {})
    if isinstance(error, RequestValidationError | ValidationError):
        return validation_problem(error.errors())
    if isinstance(error, PenstockError):
        return _penstock_problem(error)
    return Problem(500, "internal server error; see the server's log", "server_error", "internal_error")


async def handle(request: Request, error: Exception) -> Response:
    """Handle an exception of a route: record it, log it if its status is 500, and return its response."""
    problem, record = problem_of(error), RequestRecord.of(request)
    record.failed(problem.code, problem.status)
    if problem.status == 500:
        _log.error("request failed", exc_info=error, extra={"fields": {"id": record.request_id}})
    return problem.response(request.url.path, record.request_id)


def validation_problem(errors: Sequence[ErrorDetails]) -> Problem:
    """Return the 400 for the first validation error of a request, with the path of the field."""
    first_error = errors[0]
    path = field_path(first_error["loc"])
    message = str(first_error["msg"])
    if first_error["type"] == "json_invalid":
        return Problem(
            400, f"the body is not valid JSON: {first_error['ctx']['error']}", INVALID_REQUEST, "invalid_json"
        )
    if first_error["type"] == "extra_forbidden":
        return Problem(400, f"unknown field: {path}", INVALID_REQUEST, "unknown_field", path)
    code = {"missing": "missing_field"}.get(first_error["type"], "invalid_value")
    prefix = f"{path}: " if path else "the body: "
    return Problem(400, f"{prefix}{message}", INVALID_REQUEST, code, path or None)


def field_path(location: Sequence[str | int]) -> str:
    """Convert pydantic's location of an error to OpenAI's notation.

    >>> field_path(("body", "messages", 0, "content"))
    'messages[0].content'
    """
    path = ""
    for part in location[1:] if location and location[0] in ("body", "path", "query") else location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def _framework_problem(status: int, detail: str, headers: Mapping[str, str]) -> Problem:
    type_, code = _HTTP_ERRORS.get(status, (INVALID_REQUEST if status < 500 else "server_error", None))
    message = {404: "this route does not exist", 405: "this route does not support the method"}.get(
        status, detail
    )
    return Problem(status, message, type_, code, None, _with_retry_after(status, headers))


def _penstock_problem(error: PenstockError) -> Problem:
    status, type_, code = next(ERROR_TABLE[cls] for cls in type(error).__mro__ if cls in ERROR_TABLE)
    param = "model" if isinstance(error, UnknownModelError) else None
    headers = {}
    if status in (429, 503):
        headers["retry-after"] = str(error.retry_after if isinstance(error, UnavailableError) else 1)
    if isinstance(error, InsufficientMemoryError) and not isinstance(error, InsufficientBlocksError):
        headers = {"x-should-retry": "false"}  # OpenAI's clients retry other 503s
    return Problem(status, str(error), type_, code, param, headers)


def _with_retry_after(status: int, headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers, with ``retry-after: 1`` for 429 and 503 if the headers do not contain it."""
    return {**({"retry-after": "1"} if status in (429, 503) else {}), **headers}
