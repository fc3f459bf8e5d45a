"""`Generation`: the results of one request, which the server receives from the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
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
    """The results of a request since the last read."""

    token_ids: list[int]
    status: TextGenerationStatus
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    log_probabilities: list[PackedLogProbabilities | None] = field(default_factory=list)
    """One entry per token; empty if log probabilities were not requested."""
    prompt_log_probabilities: PackedLogProbabilities | None = None
    """Log probabilities of an echoed prompt if the delta has no token; otherwise the first entry of
    ``log_probabilities`` includes them.
    """
    embeddings: EmbeddingsResponse | None = None
    """The response of an embeddings request."""
    audio: list[npt.NDArray[np.floating]] = field(default_factory=list)
    """New chunks of samples, in order."""
    num_tokens: int = 0
    """Number of tokens that an audio request has generated so far."""

    def add(self, result: RequestResult) -> None:
        """Append the result of a step."""
        match result:
            case TextResult():
                self.token_ids += result.tokens
                self.log_probabilities += result.log_probabilities or ()
                self.prompt_log_probabilities = result.prompt_log_probabilities
            case EmbeddingsResult():
                self.embeddings = result.response
            case AudioResult():
                self.num_tokens = result.num_tokens
                if result.audio is not None:
                    self.audio.append(result.audio)


class Generation:
    """The results of one request, an asynchronous iterator. `EngineClient.submit` returns it.

    A request ends exactly once: the iteration stops after a `RequestDelta` with a final status, or raises
    the error of the request. A reader that stops earlier must call `cancel`.
    """

    def __init__(self, request_id: str, cancel: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._results: list[RequestResult] = []
        self._num_cached_tokens = 0
        self._is_admitted = False
        self._status = TextGenerationStatus.ACTIVE
        self._error: PenstockError | None = None
        self._is_read = False  # whether the delta with the final status was returned
        self._delivers_at_end = False
        self._waiters: list[asyncio.Future[None]] = []
        self.on_start: Callable[[], None] | None = None
        """Function that is called when the first result arrives, at most once."""
        self.on_end: Callable[[], None] | None = None
        """Function that is called once, when the request ends."""

    @property
    def is_done(self) -> bool:
        """Whether the request has ended."""
        return self._status.is_done or self._error is not None

    async def admitted(self) -> None:
        """Wait until the scheduler has admitted the request, or the request has ended.

        Raises:
            PenstockError: the error that ended the request before its admission.
        """
        while not self._is_admitted and not self.is_done:
            await self._wait_for_change()
        if self._error is not None and not self._is_admitted:
            raise self._error

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> RequestDelta:
        """Wait for results, and return all results since the last call.

        Raises:
            PenstockError: the error that ended the request; `UnavailableError` if the worker ended.
            StopAsyncIteration: a previous call has returned the final status.
        """
        while not self.is_done and (self._delivers_at_end or not self._results):
            await self._wait_for_change()
        if self._results or (self._status.is_done and not self._is_read):
            return self._take()
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def next_results(self) -> list[RequestResult]:
        """Wait for results, and return all results since the last call; [] if none follow.

        Raises:
            PenstockError: the error that ended the request.
        """
        while not self.is_done and not self._results:
            await self._wait_for_change()
        if self._error is not None and not self._results:
            raise self._error
        results, self._results = self._results, []
        return results

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache; 0 before the admission."""
        return self._num_cached_tokens

    @property
    def num_unread(self) -> int:
        """The number of results since the last read."""
        return len(self._results)

    def read_at_end(self) -> None:
        """Deliver all further results as one delta at the end of the request.

        A reader of the whole response then wakes up only once.
        """
        self._delivers_at_end = True

    def cancel(self) -> None:
        """Cancel the request. Does nothing if the request has ended."""
        if not self.is_done:
            self._status = TextGenerationStatus.CANCELLED
            self._cancel(self.request_id)
            self._report_end()
            self._wake()

    # -- Called by the engine client ---------------------------------------------------------------------

    def admit(self, num_cached_tokens: int) -> None:
        """Record that the scheduler has admitted the request."""
        self._num_cached_tokens = num_cached_tokens
        self._is_admitted = True
        self._wake()

    def add(self, result: RequestResult) -> None:
        """Add the result of a step."""
        self._results.append(result)
        self._status = result.status
        on_start, self.on_start = self.on_start, None
        if on_start is not None:
            on_start()
        if self.is_done:
            self._report_end()
        if self.is_done or not self._delivers_at_end:
            self._wake()

    def fail(self, error: PenstockError) -> None:
        """End the request with an error."""
        self._error = error
        self._report_end()
        self._wake()

    def _report_end(self) -> None:
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()

    def _take(self) -> RequestDelta:
        results, self._results = self._results, []
        self._is_read = self._status.is_done
        delta = RequestDelta([], self._status, self._num_cached_tokens)
        for result in results:
            delta.add(result)
        return delta

    async def _wait_for_change(self) -> None:
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
