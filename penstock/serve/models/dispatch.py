"""Passes each request to the application of the model that the request names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import parse_qs

import msgspec
from starlette.types import Message, Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.pipelines.core import PipelineTask
from penstock.serve.http.middleware import PUBLIC_PATHS, send_problem
from penstock.serve.http.problems import problem_of
from penstock.serve.models.registry import ModelRegistry, ServedModel
from penstock.serve.observability.request_record import RequestRecord

_PATHS_WITHOUT_MODEL = frozenset({"/sleep", "/is_sleeping", "/tokenize", "/detokenize"})
"""Paths whose routes need no loaded model, whatever the method. For GET, most routes need no loaded model."""
_SHARED_PREFIXES = ("/v1/files", "/v1/batches", "/v1/models")
"""Path prefixes of routes that do not belong to a single model."""


class _ModelName(msgspec.Struct):
    """The members of a body that may name a model."""

    model: object = None
    name: object = None


class ModelDispatcher:
    """An ASGI application that dispatches requests to the applications of the models.

    A request names its model in the query (``?model=``) or, if the query has no name, in the member ``model``
    of its JSON body. Ollama's routes also accept ``name``. Requests without a name go to the first model of
    the route's task, or to the default model if there is no such model. The default model's application also
    serves `PUBLIC_PATHS` and the paths that no model owns, such as ``/v1/models``.

    Args:
        registry: the models, with their applications.
        task_for_path: returns the task of a path; None if the path belongs to no single task.
        max_body_size: maximum bytes of a body in which to look for the model name. The routes refuse longer
            bodies.
        body_timeout: maximum seconds to wait for a body that may name the model. The routes refuse slower
            bodies.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        task_for_path: Callable[[str], PipelineTask | None],
        max_body_size: int,
        body_timeout: float,
    ) -> None:
        self._registry = registry
        self._task_for_path = task_for_path
        self._max_body_size = max_body_size
        self._body_timeout = body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["type"] != "http" or path in PUBLIC_PATHS or path.startswith(_SHARED_PREFIXES):
            await self._run(self._registry.default, scope, receive, send)
            return
        body = _BufferedBody(receive)
        try:
            await body.read(self._max_body_size, self._body_timeout)
            model = self._registry.find(_requested_name(scope, body), self._task_for_path(path))
            is_read_only = scope["method"] == "GET" and not path.startswith("/v1/audio/")
            if path in _PATHS_WITHOUT_MODEL or is_read_only:
                await self._run(model, scope, body.receive, send)
                return
            async with self._registry.keep_loaded(model):
                await self._run(model, scope, body.receive, send)
        except PenstockError as error:
            # Only errors of the dispatcher and the registry arrive here. The models' applications handle
            # their own errors.
            problem = problem_of(error)
            record: RequestRecord = scope["state"]["record"]
            record.failed(problem.code, problem.status)
            await send_problem(problem, scope, receive, send)

    async def _run(self, model: ServedModel, scope: Scope, receive: Receive, send: Send) -> None:
        assert model.app is not None
        await model.app(scope, receive, send)


class _BufferedBody:
    """Reads a body in advance and replays its ASGI messages to the application."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []

    async def read(self, max_bytes: int, seconds: float) -> None:
        """Read until the body ends or is too long, until `seconds` have passed, or until a disconnect."""
        num_bytes, has_more = 0, True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while has_more and num_bytes <= max_bytes:
                    message = await self._receive()
                    self._messages.append(message)
                    num_bytes += len(message.get("body", b""))
                    has_more = message["type"] == "http.request" and message.get("more_body", False)

    @property
    def data(self) -> bytes:
        """The bytes that `read` has read and `receive` has not returned yet."""
        return b"".join(message.get("body", b"") for message in self._messages)

    async def receive(self) -> Message:
        """Return the next message: first the messages that `read` has read, then new ones."""
        return self._messages.pop(0) if self._messages else await self._receive()


def _requested_name(scope: Scope, body: _BufferedBody) -> str | None:
    """Return the model name in a request; None if the name is missing or empty, or the body is malformed."""
    query_string: bytes = scope.get("query_string", b"")
    query = parse_qs(query_string.decode("latin-1"))
    if "model" in query:
        return query["model"][0]
    try:
        names = msgspec.json.decode(body.data, type=_ModelName)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    name = names.model
    if name is None and str(scope["path"]).startswith("/api/"):
        name = names.name
    return name if isinstance(name, str) and name else None
