"""Middleware for every request. The classes are plain ASGI, so that they do not buffer streams."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from contextlib import suppress
from uuid import uuid4

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.serve import playground
from penstock.serve.http.auth import ApiKeys
from penstock.serve.http.problems import Problem, RequestProblem, problem_of
from penstock.serve.observability.access_log import log_request
from penstock.serve.observability.request_record import RequestRecord
from penstock.serve.services import Services

_log = logging.getLogger(__name__)

PROBE_PATHS = (
    frozenset({"/health", "/ping", "/load", "/ready", "/version", "/metrics", "/playground/stats"})
    | playground.PATHS
)
"""Paths of probes and of the playground page: always public, not in the metrics, logged at level debug."""

PUBLIC_PATHS = PROBE_PATHS | {"/openapi.json"}
"""Paths that need no API key and work while the model is being loaded. Their responses have no request data.
"""

INTERNAL_SCOPE_KEY = "penstock.internal"
"""Key in the ASGI scope of requests without a connection, such as lines of a batch. No client can set it."""

_MAX_DRAIN_BYTES = 64 * 1024
_DRAIN_SECONDS = 1.0

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
_MAX_SESSION_LENGTH = 256
_REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class ObservabilityMiddleware:
    """The outermost middleware. Records each request, and converts unhandled errors to error responses.

    Reports the record to the metrics, the span and the access log; the record of a probe only to the log.
    """

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        if scope["method"] == "HEAD":  # handled as GET; the HTTP server omits the body
            scope = {**scope, "method": "GET"}
        record = exchange.record
        is_probe = scope["path"] in PROBE_PATHS
        metrics = None if is_probe else self._services.metrics.request_received()
        tracing = None if is_probe else self._services.tracing
        span = tracing.begin(record, scope["headers"]) if tracing is not None else None
        record.observers += [observer for observer in (metrics, span) if observer is not None]
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except ClientDisconnect:
            record.client_left = True
        except Exception as error:
            await exchange.report_error(error)
        except BaseException:  # an immediate shutdown cancels the request
            record.failed("cancelled", 503)
            raise
        finally:
            record.ended_at = time.perf_counter()
            record.route = _route_of(scope)
            if metrics is not None:
                metrics.finished(record)
            if span is not None:
                span.finished(record)
            if self._services.config.access_log:
                log_request(record, is_probe=is_probe)


class _Exchange:
    """One request and its response. Updates the request's record from the ASGI messages of both."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self.record = RequestRecord(_request_id(scope), method)
        self._scope = scope
        self._receive = receive
        self._send = send
        self._is_stream = False
        self._is_complete = False
        scope.setdefault("state", {})["record"] = self.record

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._is_complete:
            self.record.client_left = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.record.request_id
            self._is_stream = headers.get("content-type", "").startswith("text/event-stream")
            self.record.status = message["status"]
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_complete = True
        await self._send(message)

    async def report_error(self, error: Exception) -> None:
        """Report an unhandled error by a response, by an error event, or by closing the connection.

        Sends nothing if the response is complete or the client has disconnected.
        """
        # Starlette raises a RuntimeError from an error whose response has already started.
        cause = error.__cause__ if isinstance(error, RuntimeError) and self.record.status else None
        problem = problem_of(cause or error)
        self.record.failed(problem.code, problem.status)
        if problem.status == 500 and not self.record.client_left:
            _log.error("request failed", exc_info=error, extra={"fields": {"id": self.record.request_id}})
        if self._is_complete or self.record.client_left:
            return
        if self.record.status is None:
            await send_problem(problem, self._scope, self.receive, self.send)
        elif self._is_stream:
            event = b"data: " + problem.encode() + b"\n\n"
            await self.send({"type": "http.response.body", "body": event})
        else:
            raise error  # part of the response has been sent, so the HTTP server closes the connection


class AdmissionMiddleware:
    """Accepts a request if its path is public, or if its API key is valid and the gate is open.

    Internal requests, such as lines of a batch, need no API key.
    """

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._gate = services.gate
        self._keys = ApiKeys(services.config.api_key)
        self._session_header = services.config.session_header.lower().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            is_internal = INTERNAL_SCOPE_KEY in scope
            key_index = None if is_internal else self._keys.check(scope["headers"])
            record: RequestRecord = scope["state"]["record"]
            record.client_id = _client_id(key_index, scope)
            record.header_session_id = _session_id(scope, self._session_header)
            if self._gate.refusal_reason:
                headers = {"connection": "close", "retry-after": "1"}
                raise RequestProblem(503, f"{self._gate.refusal_reason}: try again", headers=headers)
        except RequestProblem as error:
            record = scope["state"]["record"]
            problem = problem_of(error)
            record.failed(problem.code, problem.status)
            await _drain_body(receive)
            await send_problem(problem, scope, receive, send)
            return
        with self._gate.track():
            await self._app(scope, receive, send)


def _client_id(key_index: int | None, scope: Scope) -> str:
    """Return the client id for fair scheduling: the API key's index, or host and port without an index."""
    if key_index is not None:
        return f"key {key_index}"
    host, port = scope.get("client") or ("", 0)
    return f"{host}:{port}"


def _session_id(scope: Scope, header_name: bytes) -> str:
    """Return the session id in a header, cut to `_MAX_SESSION_LENGTH` characters; "" without the header."""
    for name, value in scope["headers"]:
        if name == header_name:
            session_id: str = value.decode("latin-1")
            return session_id[:_MAX_SESSION_LENGTH]
    return ""


async def send_problem(problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a problem as the response."""
    response = problem.response(scope["path"], scope["state"]["record"].request_id)
    await response(scope, receive, send)


async def _drain_body(receive: Receive) -> None:
    """Read the body of a refused request until it ends or exceeds 64 KiB, for at most 1 s.

    Closing a connection with unread bytes resets the connection, and the client may lose the response.
    """
    num_bytes, has_more = 0, True
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while has_more and num_bytes <= _MAX_DRAIN_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                has_more = message.get("more_body", False)


def _request_id(scope: Scope) -> str:
    """Return the client's request id if it is short and safe for headers and logs, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            request_id: str = value.decode("latin-1")
            if _REQUEST_ID_PATTERN.fullmatch(request_id):
                return request_id
    return uuid4().hex


def _route_of(scope: Scope) -> str:
    """Return the path template of the matched route, or "unmatched". Limits the number of metric labels."""
    route = scope.get("route")
    return "unmatched" if route is None else str(route.path)
