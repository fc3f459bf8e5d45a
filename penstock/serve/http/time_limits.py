"""Time limits of a response: for the whole request, and between two items of its stream."""

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
    """The limits of one request: the whole time since its arrival, and the time between two tokens."""

    def __init__(self, config: ServeConfig, record: RequestRecord) -> None:
        self._request_timeout = config.request_timeout
        self._stream_timeout = config.stream_timeout
        self._received_at = record.received_at

    async def within(self, result: Awaitable[T]) -> T:
        """Await a result within the limit of the whole request.

        Raises:
            RequestProblem: 503, the request takes too long.
        """
        return await self._await(result, None)

    async def with_pings(
        self, items: AsyncIterator[T], *, ping: float, progress: Callable[[], int] = int
    ) -> AsyncGenerator[T | None, None]:
        """Yield the items, and None whenever no item has arrived for ``ping`` seconds.

        The limit for the next item (``stream_timeout``) does not apply before the first item, because the
        prefill of a long prompt can take longer.

        Args:
            items: yields the items. Cancelling its ``__anext__`` must not lose an item.
            ping: seconds without an item after which None is yielded.
            progress: returns a number that changes when data for the next item arrives. A change restarts
                the limit for the next item.

        Raises:
            RequestProblem: 503, the request or the next item takes too long.
        """
        limit: float | None = None
        while True:
            silent_seconds, last_progress = 0.0, progress()
            while True:
                seconds = ping if limit is None else min(ping, limit - silent_seconds)
                try:
                    item = await self._await(anext(items), seconds)
                    break
                except StopAsyncIteration:
                    return
                except _NoItemError:
                    silent_seconds += seconds
                if progress() != last_progress:
                    silent_seconds, last_progress = 0.0, progress()
                elif limit is not None and silent_seconds >= limit:
                    raise RequestProblem(
                        503, f"no token arrived for {limit:g} seconds", code="timeout"
                    ) from None
                yield None
            yield item
            limit = self._stream_timeout

    async def _await(self, result: Awaitable[T], seconds: float | None) -> T:
        """Await a result for at most ``seconds``, and at most until the request's time limit.

        Raises:
            _NoItemError: ``seconds`` have passed.
            RequestProblem: 503, the request's time limit has passed.
        """
        request_timeout = self._request_timeout
        remaining_seconds = (
            None
            if request_timeout is None
            else max(0.0, self._received_at + request_timeout - time.perf_counter())
        )
        is_request_limit = remaining_seconds is not None and (seconds is None or remaining_seconds <= seconds)
        try:
            async with asyncio.timeout(remaining_seconds if is_request_limit else seconds):
                return await result
        except TimeoutError:
            if not is_request_limit:
                raise _NoItemError from None
            message = f"the request took longer than {request_timeout:g} seconds, the limit of this server"
            raise RequestProblem(503, message, code="timeout") from None


class _NoItemError(Exception):
    """No item arrived in time."""
