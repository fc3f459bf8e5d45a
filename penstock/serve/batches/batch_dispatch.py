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
"""The client of all batches, for fair scheduling."""
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
    """Runs the lines of a batch, several at a time, and reports each result at once.

    Args:
        app: the application.
        concurrency: number of lines that run at the same time.
        is_stopping: whether the server stops; then no further line is started.
        on_result: called with the line of each result, whether it succeeded, and its output tokens.
        max_attempts: attempts of a line whose response is 503, because the worker is being restarted;
            attempts are half a second apart.
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
            StoppedError: the server stops; lines without a reported result must run again.
        """
        loop = asyncio.get_running_loop()

        async def work() -> None:
            while not self._is_stopping():
                line = await loop.run_in_executor(None, next, lines, None)
                if line is None:
                    return
                await self._one(line)
            raise StoppedError

        # Lines are read in a thread, one at a time.
        lines = _Locked(lines)
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._concurrency):
                    tasks.create_task(work())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _one(self, line: BatchRequest | BadLine) -> None:
        if isinstance(line, BadLine):
            self._on_result(escape_line_ends(msgspec.json.encode(line.result)), False, 0)
            return
        num_failed = 0
        while True:
            answer = await post(self._app, line.url, line.body)
            is_temporary = answer.status == 429 or (answer.status == 503 and num_failed < self._max_attempts)
            if not is_temporary:
                break
            if self._is_stopping():
                raise StoppedError
            num_failed += answer.status == 503
            await asyncio.sleep(_RETRY_SECONDS)
        found = result_line(line.custom_id, answer.status, answer.request_id, answer.body)
        self._on_result(found, answer.status == 200, _num_tokens(answer.body))


class _Locked(Iterator[BatchRequest | BadLine]):
    """An iterator that several threads may call."""

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
