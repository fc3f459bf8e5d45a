"""Runs the requests of a batch through the routes of the server, without network connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock

import msgspec
from starlette.types import ASGIApp

from penstock.serve.batches.batch_lines import BatchRequest, InvalidLine, result_line
from penstock.serve.http.internal_request import internal_request
from penstock.serve.http.sse import escape_line_ends

BATCH_CLIENT_ID = "batch"
"""The client id of all batches, for fair scheduling."""
_RETRY_SECONDS = 0.5
"""Seconds between a response with status 429 or 503 and the next attempt of the request."""
MAX_RETRIES = 5
"""Default maximum number of times that a request is sent again after a response with status 503."""


class StoppedError(Exception):
    """The batch was stopped before all its requests had results."""


@dataclass(frozen=True)
class BatchResponse:
    """The complete response to a request of a batch."""

    status: int
    request_id: str
    body: bytes


async def post(app: ASGIApp, path: str, body: dict[str, object]) -> BatchResponse:
    """Send a request to the application and return the response.

    If the calling task is cancelled, the request is cancelled.
    """
    async with internal_request(app, path, body, {}, client=BATCH_CLIENT_ID) as response:
        request_id = response.headers.get(b"x-request-id", b"").decode()
        return BatchResponse(response.status, request_id, await response.body())


class BatchDispatcher:
    """Runs the requests of a batch concurrently and reports each result when it is available.

    Args:
        app: the application.
        concurrency: maximum number of requests that run concurrently.
        is_stopping: returns whether the server is stopping. When it returns True, no further request starts.
        on_result: called with (result line, whether the request succeeded, number of output tokens).
        max_retries: maximum number of times that a request is sent again after a response with status 503,
            for example while the worker is being restarted. After status 429, a request is sent again without
            a limit.
    """

    def __init__(
        self,
        app: ASGIApp,
        concurrency: int,
        *,
        is_stopping: Callable[[], bool],
        on_result: Callable[[bytes, bool, int], None],
        max_retries: int = MAX_RETRIES,
    ) -> None:
        self._app = app
        self._concurrency = concurrency
        self._is_stopping = is_stopping
        self._on_result = on_result
        self._max_retries = max_retries

    async def run(self, lines: Iterator[BatchRequest | InvalidLine]) -> None:
        """Run the requests of all lines. An invalid line gives the result of a failed request.

        Raises:
            StoppedError: the server is stopping. Lines without a reported result must run again.
        """
        loop = asyncio.get_running_loop()

        async def run_lines() -> None:
            while not self._is_stopping():
                line = await loop.run_in_executor(None, next, lines, None)
                if line is None:
                    return
                await self._run_line(line)
            raise StoppedError

        # All tasks read their lines from one iterator. They read in threads, because reading blocks.
        lines = _LockedIterator(lines)
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._concurrency):
                    tasks.create_task(run_lines())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run_line(self, line: BatchRequest | InvalidLine) -> None:
        if isinstance(line, InvalidLine):
            self._on_result(escape_line_ends(msgspec.json.encode(line.result)), False, 0)
            return
        num_unavailable = 0  # number of responses with status 503
        while True:
            response = await post(self._app, line.url, line.body)
            is_temporary = response.status == 429 or (
                response.status == 503 and num_unavailable < self._max_retries
            )
            if not is_temporary:
                break
            if self._is_stopping():
                raise StoppedError
            num_unavailable += response.status == 503
            await asyncio.sleep(_RETRY_SECONDS)
        result = result_line(line.custom_id, response.status, response.request_id, response.body)
        self._on_result(result, response.status == 200, _num_tokens(response.body))


class _LockedIterator(Iterator[BatchRequest | InvalidLine]):
    """A thread-safe iterator over lines."""

    def __init__(self, lines: Iterator[BatchRequest | InvalidLine]) -> None:
        self._lines = lines
        self._lock = Lock()

    def __next__(self) -> BatchRequest | InvalidLine:
        with self._lock:
            return next(self._lines)


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    output_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage | None = None


def _num_tokens(body: bytes) -> int:
    """Return the number of output tokens of a response; 0 if it has no usage."""
    try:
        usage = msgspec.json.decode(body, type=_Body).usage
    except msgspec.DecodeError:
        return 0
    return 0 if usage is None else usage.completion_tokens + usage.output_tokens
