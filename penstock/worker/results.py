"""The results of one request on the serving side, as they come from the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from penstock.errors import PenstockError
from penstock.pipelines.core import EmbeddingsResponse, TextGenerationStatus
from penstock.worker.messages import (
    AudioResult,
    EmbeddingsResult,
    PackedLogProbabilities,
    RequestResult,
    TextResult,
)


@dataclass(slots=True)
class RequestDelta:
    """What came for a request since it was last asked."""

    token_ids: list[int]
    status: TextGenerationStatus
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    log_probabilities: list[PackedLogProbabilities | None] = field(default_factory=list)
    """One entry per token if they were requested."""
    prompt_log_probabilities: PackedLogProbabilities | None = None
    """Those of an echoed prompt whose very first token ended the output; else the first token has them."""
    embeddings: EmbeddingsResponse | None = None
    """The response of an embeddings request."""
    audio: list[npt.NDArray[Any]] = field(default_factory=list)
    """New chunks of samples, in order."""

    def add(self, result: RequestResult) -> None:
        """Append what a step computed."""
        match result:
            case TextResult():
                self.token_ids += result.tokens
                self.log_probabilities += result.log_probabilities or ()
                self.prompt_log_probabilities = result.prompt_log_probabilities
            case EmbeddingsResult():
                self.embeddings = result.response
            case AudioResult():
                if result.audio is not None:
                    self.audio.append(result.audio)


class Generation:
    """The results of one request, as they come; made by `WorkerClient.submit`.

    A request ends once: iteration stops after a `RequestDelta` whose status is done, or raises the error of
    the request. A reader that stops earlier must call `cancel`.
    """

    def __init__(self, request_id: str, cancel: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._results: list[RequestResult] = []
        self._num_cached_tokens = 0
        self._is_admitted = False
        self._status = TextGenerationStatus.ACTIVE
        self._error: PenstockError | None = None
        self._is_read = False  # the last delta was given
        self._is_read_at_end = False
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come from the worker."""
        return self._status.is_done or self._error is not None

    async def admitted(self) -> None:
        """Returns when the request was given its place in a batch; from then on it is sure to be served.

        Raises:
            PenstockError: it was refused.
        """
        while not self._is_admitted and not self.is_done:
            await self._change()
        if self._error is not None and not self._is_admitted:
            raise self._error

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> RequestDelta:
        """All that came since the last call, once there is something.

        Raises:
            PenstockError: the request ended with it; `UnavailableError` where the worker died.
        """
        while not self.is_done and (self._is_read_at_end or not self._results):
            await self._change()
        if self._results or (self._status.is_done and not self._is_read):
            return self._take()
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    @property
    def num_unread(self) -> int:
        """How often something came since the last call."""
        return len(self._results)

    def read_at_end(self) -> None:
        """From now on the next delta is the last: who needs the whole is not woken at each step."""
        self._is_read_at_end = True

    def cancel(self) -> None:
        """Ends the request, if it has not ended; its blocks are free one step later."""
        if not self.is_done:
            self._status = TextGenerationStatus.CANCELLED
            self._cancel(self.request_id)
            self._wake()

    # -- What the client hears ---------------------------------------------------------------------------

    def admit(self, num_cached_tokens: int) -> None:
        """It has its place."""
        self._num_cached_tokens = num_cached_tokens
        self._is_admitted = True
        self._wake()

    def add(self, result: RequestResult) -> None:
        """A step brought something."""
        self._results.append(result)
        self._status = result.status
        if self.is_done or not self._is_read_at_end:
            self._wake()

    def fail(self, error: PenstockError) -> None:
        """It ended with an error."""
        self._error = error
        self._wake()

    def _take(self) -> RequestDelta:
        results, self._results = self._results, []
        self._is_read = self._status.is_done
        delta = RequestDelta([], self._status, self._num_cached_tokens)
        for result in results:
            delta.add(result)
        return delta

    async def _change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
