"""Run the lines of a batch through the routes of the server, without a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock

import msgspec
from starlette.types import ASGIApp

from penstock.serve.batches.batch_lines import BadLine, BatchRequest, result_line
from penstock.serve.http.internal_request import internal_request
from penstock.serve.http.sse import escape_line_ends

CLIENT = "batch"
"""The client id of all batches, for fair scheduling."""
_RETRY_SECONDS = 0.5
MAX_ATTEMPTS = 5
"""Default of ``max_attempts`` of `BatchDispatcher`."""


class StoppedError(Exception):
    """The batch was stopped before all lines had a result."""


@dataclass(frozen=True)
class Answer:
    """The response to an internal request."""

    status: int
    request_id: str
    body: bytes


async def post(app: ASGIApp, path: str, body: dict[str, object]) -> Answer:
    """Send a request to the application, and return the response.

    Cancelling the task cancels the request.
    """
    async with internal_request(app, path, body, {}, client=CLIENT) as response:
        request_id = response.headers.get(b"x-request-id", b"").decode()
        return Answer(response.status, request_id, await response.body())


class BatchDispatcher:
    """Runs the lines of a batch, several concurrently, and reports each result when it is available.

    Args:
        app: the application.
        concurrency: number of lines that run concurrently.
        is_stopping: returns whether the server is stopping. No further line is then started.
        on_result: called with (line of the result, whether the request succeeded, number of output tokens).
        max_attempts: attempts of a line whose response is 503, for example during a restart of the worker.
            Attempts are half a second apart.
    """

    def __init__(
        self,
        app: ASGIApp,
        concurrency: int,
        *,
        is_stopping: Callable[[], bool],
        on_result: Callable[[bytes, bool, int], None],
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        self._app = app
        self._concurrency = concurrency
        self._is_stopping = is_stopping
        self._on_result = on_result
        self._max_attempts = max_attempts

    async def run(self, lines: Iterator[BatchRequest | BadLine]) -> None:
        """Run all lines.

        Raises:
            StoppedError: the server is stopping. The lines without a reported result have not run.
        """
        loop = asyncio.get_running_loop()

        async def run_lines() -> None:
            while not self._is_stopping():
                line = await loop.run_in_executor(None, next, lines, None)
                if line is None:
                    return
                await self._run_line(line)
            raise StoppedError

        # The tasks below share the iterator. Each reads its next line in a thread.
        lines = _LockedIterator(lines)
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._concurrency):
                    tasks.create_task(run_lines())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run_line(self, line: BatchRequest | BadLine) -> None:
        if isinstance(line, BadLine):
            self._on_result(escape_line_ends(msgspec.json.encode(line.result)), False, 0)
            return
        num_failed = 0
        while True:
            response = await post(self._app, line.url, line.body)
            is_temporary = response.status == 429 or (
                response.status == 503 and num_failed < self._max_attempts
            )
            if not is_temporary:
                break
            if self._is_stopping():
                raise StoppedError
            num_failed += response.status == 503
            await asyncio.sleep(_RETRY_SECONDS)
        result = result_line(line.custom_id, response.status, response.request_id, response.body)
        self._on_result(result, response.status == 200, _num_tokens(response.body))


class _LockedIterator(Iterator[BatchRequest | BadLine]):
    """A thread-safe iterator over lines."""

    def __init__(self, lines: Iterator[BatchRequest | BadLine]) -> None:
        self._lines = lines
        self._lock = Lock()

    def __next__(self) -> BatchRequest | BadLine:
        with self._lock:
            return next(self._lines)


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    output_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage | None = None


def _num_tokens(body: bytes) -> int:
    """Return the number of output tokens of a response."""
    try:
        usage = msgspec.json.decode(body, type=_Body).usage
    except msgspec.DecodeError:
        return 0
    return 0 if usage is None else usage.completion_tokens + usage.output_tokens
