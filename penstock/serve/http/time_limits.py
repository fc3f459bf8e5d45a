"""How long an answer may take: as a whole, and between two tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeVar

from penstock.serve.config import ServeConfig
from penstock.serve.http.problems import RequestProblem
from penstock.serve.observability.request_record import RequestRecord

T = TypeVar("T")


class TimeLimits:
    """The limits of one request, which began when it was received."""

    def __init__(self, config: ServeConfig, record: RequestRecord) -> None:
        self._whole = config.request_timeout
        self._pause = config.stream_timeout
        self._received = record.received

    async def within(self, waiting: Awaitable[T]) -> T:
        """Awaits something that the whole request's limit bounds alone, such as a place in the batch.

        Raises:
            RequestProblem: 503, the request has taken too long.
        """
        return await self._await(waiting, None)

    async def pauses(
        self, deltas: AsyncIterator[T], *, ping: float, progress: Callable[[], int] = int
    ) -> AsyncGenerator[T | None, None]:
        """The items as they come, and None where none has come for ``ping`` seconds.

        The pause before the first is not bounded by itself: a long prompt takes its time.

        Args:
            deltas: its ``__anext__`` may be cancelled without loss.
            ping: seconds.
            progress: how much has come that is part of no item yet; while it changes there is no pause.

        Raises:
            RequestProblem: 503, the request or a pause has taken too long.
        """
        pause: float | None = None
        while True:
            waited, seen = 0.0, progress()
            while True:
                left = None if pause is None else pause - waited
                seconds = ping if left is None else min(ping, left)
                try:
                    item = await self._await(anext(deltas), seconds)
                    break
                except StopAsyncIteration:
                    return
                except _QuietError:
                    waited += seconds
                if progress() != seen:
                    waited, seen = 0.0, progress()
                elif pause is not None and waited >= pause:
                    raise RequestProblem(
                        503, f"no token came for {pause:g} seconds", code="timeout"
                    ) from None
                yield None
            yield item
            pause = self._pause

    async def _await(self, waiting: Awaitable[T], seconds: float | None) -> T:
        """Raises `_QuietError` after some seconds, where the whole request may take longer."""
        left = None if self._whole is None else max(0.0, self._received + self._whole - time.perf_counter())
        ends_all = left is not None and (seconds is None or left <= seconds)
        try:
            async with asyncio.timeout(left if ends_all else seconds):
                return await waiting
        except TimeoutError:
            if not ends_all:
                raise _QuietError from None
            message = f"the request took longer than {self._whole:g} seconds, the limit of this server"
            raise RequestProblem(503, message, code="timeout") from None


class _QuietError(Exception):
    """Nothing came for some time."""
