"""Time limits of a response: for the whole request, and between two tokens."""

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
    """The limits of one request, counted from its arrival."""

    def __init__(self, config: ServeConfig, record: RequestRecord) -> None:
        self._request_timeout = config.request_timeout
        self._stream_timeout = config.stream_timeout
        self._received = record.received

    async def within(self, waiting: Awaitable[T]) -> T:
        """Await a result within the limit of the whole request.

        Raises:
            RequestProblem: 503, the request takes too long.
        """
        return await self._await(waiting, None)

    async def with_pings(
        self, deltas: AsyncIterator[T], *, ping: float, progress: Callable[[], int] = int
    ) -> AsyncGenerator[T | None, None]:
        """Yield the items, and None whenever no item has arrived for ``ping`` seconds.

        The stream time limit does not apply before the first item, because a long prompt takes long.

        Args:
            deltas: the items. Cancelling its ``__anext__`` must not lose an item.
            ping: seconds between two None.
            progress: returns the amount of data received for the next item. A change restarts the time limit.

        Raises:
            RequestProblem: 503, the request or the next item takes too long.
        """
        limit: float | None = None
        while True:
            waited, seen = 0.0, progress()
            while True:
                seconds = ping if limit is None else min(ping, limit - waited)
                try:
                    item = await self._await(anext(deltas), seconds)
                    break
                except StopAsyncIteration:
                    return
                except _NoItemError:
                    waited += seconds
                if progress() != seen:
                    waited, seen = 0.0, progress()
                elif limit is not None and waited >= limit:
                    raise RequestProblem(
                        503, f"no token arrived for {limit:g} seconds", code="timeout"
                    ) from None
                yield None
            yield item
            limit = self._stream_timeout

    async def _await(self, waiting: Awaitable[T], seconds: float | None) -> T:
        """Raise `_NoItemError` after ``seconds``, unless the limit of the whole request comes first."""
        whole = self._request_timeout
        left = None if whole is None else max(0.0, self._received + whole - time.perf_counter())
        is_last = left is not None and (seconds is None or left <= seconds)
        try:
            async with asyncio.timeout(left if is_last else seconds):
                return await waiting
        except TimeoutError:
            if not is_last:
                raise _NoItemError from None
            message = f"the request took longer than {whole:g} seconds, the limit of this server"
            raise RequestProblem(503, message, code="timeout") from None


class _NoItemError(Exception):
    """No item arrived in time."""
