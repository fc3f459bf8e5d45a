"""Errors as OpenAI's clients expect them: one table from exceptions to status, type and code.

Every error leaves as ``{"error": {"message", "type", "param", "code"}}``, whoever noticed it: the HTTP
layer, the validation of a body, the tokenizer, the scheduler, or nobody before it was too late.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
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

INVALID = "invalid_request_error"

TABLE: Mapping[type[PenstockError], tuple[int, str, str | None]] = {
    PromptTooLongError: (400, INVALID, "context_length_exceeded"),
    UnknownModelError: (404, INVALID, "model_not_found"),
    TaskMismatchError: (400, INVALID, "unsupported_task"),
    UnsupportedSchemaError: (400, INVALID, "unsupported_schema"),
    UnsupportedFeatureError: (400, INVALID, "unsupported_value"),
    InputError: (400, INVALID, None),
    CheckpointError: (400, INVALID, "invalid_path"),  # of an adapter: the model itself is there
    ConfigError: (400, INVALID, "invalid_value"),
    MissingDependencyError: (400, INVALID, "unsupported_value"),
    OverloadedError: (429, "rate_limit_error", "rate_limit_exceeded"),
    UnavailableError: (503, "service_unavailable_error", "service_unavailable"),
    InsufficientMemoryError: (503, "service_unavailable_error", "insufficient_memory"),
    ForkedProcessError: (500, "server_error", "internal_error"),
    RequestFailedError: (500, "server_error", "internal_error"),
    PenstockError: (500, "server_error", "internal_error"),
}
"""The nearest class in an exception's ancestry decides: status, OpenAI's ``type``, ``code``."""

_OF_STATUS: Mapping[int, tuple[str, str | None]] = {
    401: ("authentication_error", "invalid_api_key"),
    403: (INVALID, "forbidden"),
    404: (INVALID, "not_found"),
    405: (INVALID, "method_not_allowed"),
    408: (INVALID, "request_timeout"),
    413: (INVALID, "request_too_large"),
    415: (INVALID, "unsupported_media_type"),
    421: (INVALID, "unknown_host"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    503: ("service_unavailable_error", "service_unavailable"),
}
"""Type and code of what the HTTP layer raises itself."""


class RequestProblem(HTTPException):
    """An error born in the HTTP layer.

    Args:
        status: the status code.
        message: for the client: what is wrong and what to do.
        param: the field at fault, ``messages[0].content``.
        code: OpenAI's code; by default what the status stands for.
        type: OpenAI's type; by default what the status stands for.
        headers: more headers of the answer.
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
    """An error as it leaves."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's object; also the data of a stream's error event."""
        named = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": named}

    def encode(self) -> bytes:
        """`body` in JSON."""
        # A message may quote half a surrogate pair, which no UTF-8 can hold.
        plain = self.message.encode("utf-8", "backslashreplace").decode()
        param = self.param and self.param.encode("utf-8", "backslashreplace").decode()
        return msgspec.json.encode({"error": {**self.body["error"], "message": plain, "param": param}})

    def response(self) -> Response:
        """The answer of a request that has not been answered yet."""
        return Response(self.encode(), self.status, dict(self.headers), media_type="application/json")


def problem_of(error: BaseException) -> Problem:
    """What a client is told of an exception. Of one that nobody foresaw it is told nothing but that."""
    if isinstance(error, RequestProblem):
        type_, code = _OF_STATUS.get(error.status_code, (INVALID, None))
        return Problem(
            error.status_code,
            error.message,
            error.type or type_,
            error.code or code,
            error.param,
            _with_retry(error.status_code, error.headers or {}),
        )
    if isinstance(error, HTTPException):
        return _problem_of_framework(error.status_code, str(error.detail), error.headers or {})
    if isinstance(error, RequestValidationError | ValidationError):
        return problem_of_validation(error.errors())
    if isinstance(error, PenstockError):
        return _problem_of_table(error)
    return Problem(500, "the server made a mistake; its log shows it", "server_error", "internal_error")


async def handle(request: Request, error: Exception) -> Response:
    """The handler of every exception that an application knows of; the record learns of it."""
    problem, record = problem_of(error), RequestRecord.of(request)
    record.failed(problem.code, problem.status)
    if problem.status == 500:
        _log.error("request failed", exc_info=error, extra={"fields": {"id": record.request_id}})
    return problem.response()


def problem_of_validation(errors: Any) -> Problem:
    """The 400 of a body that is not what the schema says: the first error, under the field's path."""
    first = errors[0]
    path = field_path(first["loc"])
    message = str(first["msg"])
    if first["type"] == "json_invalid":
        return Problem(400, f"the body is not valid JSON: {first['ctx']['error']}", INVALID, "invalid_json")
    if first["type"] == "extra_forbidden":
        return Problem(400, f"unknown field: {path}", INVALID, "unknown_field", path)
    code = {"missing": "missing_field"}.get(first["type"], "invalid_value")
    where = f"{path}: " if path else "the body: "
    return Problem(400, f"{where}{message}", INVALID, code, path or None)


def field_path(location: Any) -> str:
    """Pydantic's location as OpenAI writes it.

    >>> field_path(("body", "messages", 0, "content"))
    'messages[0].content'
    """
    path = ""
    for part in location[1:] if location and location[0] in ("body", "path", "query") else location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def _problem_of_framework(status: int, detail: str, headers: Mapping[str, str]) -> Problem:
    type_, code = _OF_STATUS.get(status, (INVALID if status < 500 else "server_error", None))
    message = {404: "there is no such route here", 405: "this route does not take that method"}.get(
        status, detail
    )
    return Problem(status, message, type_, code, None, _with_retry(status, headers))


def _problem_of_table(error: PenstockError) -> Problem:
    status, type_, code = next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)
    param = "model" if isinstance(error, UnknownModelError) else None
    headers = {}
    if status in (429, 503):
        headers["retry-after"] = str(error.retry_after if isinstance(error, UnavailableError) else 1)
    if isinstance(error, InsufficientMemoryError) and not isinstance(error, InsufficientBlocksError):
        headers = {"x-should-retry": "false"}  # OpenAI's clients repeat other 503s
    return Problem(status, str(error), type_, code, param, headers)


def _with_retry(status: int, headers: Mapping[str, str]) -> dict[str, str]:
    return {**({"retry-after": "1"} if status in (429, 503) else {}), **headers}
