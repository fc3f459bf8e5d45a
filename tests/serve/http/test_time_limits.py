"""Time limits of requests and streams."""

from __future__ import annotations

import asyncio
import time
from itertools import accumulate

import pytest

from penstock.serve.config import ServeConfig
from penstock.serve.http.problems import RequestProblem, problem_of
from penstock.serve.http.time_limits import TimeLimits
from penstock.serve.observability.request_record import RequestRecord


class TimedItems:
    """An iterator of numbers at fixed times. A cancelled wait does not change the times."""

    def __init__(self, *pauses: float) -> None:
        self._start = time.perf_counter()
        self._times = list(accumulate(pauses))
        self._next = 0

    def __aiter__(self) -> TimedItems:
        return self

    async def __anext__(self) -> int:
        if self._next == len(self._times):
            raise StopAsyncIteration
        await asyncio.sleep(max(0.0, self._start + self._times[self._next] - time.perf_counter()))
        self._next += 1
        return self._next - 1


def make_limits(**config: float) -> TimeLimits:
    return TimeLimits(ServeConfig(**config), RequestRecord())


async def collect_items(limits: TimeLimits, *pauses: float, ping: float = 30) -> list[int | None]:
    return [item async for item in limits.with_pings(TimedItems(*pauses), ping=ping)]


async def test_items_within_the_limits_are_yielded() -> None:
    assert await collect_items(make_limits(), 0, 0.01) == [0, 1]
    assert await collect_items(make_limits(request_timeout=5, stream_timeout=5), 0, 0.01, 0) == [0, 1, 2]
    assert await make_limits(request_timeout=5).within(asyncio.sleep(0, "done")) == "done"


async def test_the_stream_timeout_limits_the_time_between_two_items() -> None:
    with pytest.raises(RequestProblem) as exc_info:
        await collect_items(make_limits(stream_timeout=0.05), 0, 0, 60)
    assert "no token arrived for 0.05 seconds" in exc_info.value.message
    assert problem_of(exc_info.value).code == "timeout"
    assert problem_of(exc_info.value).headers["retry-after"]


async def test_the_stream_timeout_does_not_apply_to_the_first_item() -> None:
    assert await collect_items(make_limits(stream_timeout=1), 1.2, 0) == [0, 1]


async def test_the_request_timeout_limits_the_whole_stream() -> None:
    received_items: list[int | None] = []

    async def collect() -> None:
        limits = make_limits(request_timeout=0.1, stream_timeout=60)
        async for item in limits.with_pings(TimedItems(0, *[0.02] * 1000), ping=30):
            received_items.append(item)

    with pytest.raises(RequestProblem, match=r"longer than 0\.1 seconds"):
        await collect()
    assert 0 < len(received_items) < 1000


async def test_the_request_timeout_limits_the_wait_for_a_result() -> None:
    with pytest.raises(RequestProblem, match=r"longer than 0\.05 seconds"):
        await make_limits(request_timeout=0.05).within(asyncio.sleep(60))


async def test_the_request_timeout_starts_when_the_request_arrives() -> None:
    config, record = ServeConfig(request_timeout=0.05), RequestRecord()
    await asyncio.sleep(0.06)
    with pytest.raises(RequestProblem):
        await TimeLimits(config, record).within(asyncio.sleep(60))


async def test_none_is_yielded_while_no_item_arrives() -> None:
    """For each None, a stream sends a comment, which keeps the connection open. No item is lost.

    None does not restart the stream timeout.
    """
    received_items: list[int | None] = []
    may_continue = asyncio.Event()

    class DelayedItems(TimedItems):
        async def __anext__(self) -> int:
            if self._next == 1:
                await may_continue.wait()
            return await super().__anext__()

    async for item in make_limits().with_pings(DelayedItems(0, 0, 0), ping=0.05):
        received_items.append(item)
        if received_items.count(None) == 2:
            may_continue.set()
    assert [item for item in received_items if item is not None] == [0, 1, 2]
    assert received_items[1:3] == [None, None]
    with pytest.raises(RequestProblem, match=r"no token arrived for 0\.1 seconds"):
        await collect_items(make_limits(stream_timeout=0.1), 0, 60, ping=0.03)
