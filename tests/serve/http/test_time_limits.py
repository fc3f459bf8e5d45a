"""How long an answer may take."""

from __future__ import annotations

import asyncio
import time
from itertools import accumulate

import pytest

from penstock.serve.config import ServeConfig
from penstock.serve.http.problems import RequestProblem, problem_of
from penstock.serve.http.time_limits import TimeLimits
from penstock.serve.observability.request_record import RequestRecord


class Items:
    """Numbers that come at their times, however often somebody stops waiting for them."""

    def __init__(self, *pauses: float) -> None:
        self._start = time.perf_counter()
        self._times = list(accumulate(pauses))
        self._next = 0

    def __aiter__(self) -> Items:
        return self

    async def __anext__(self) -> int:
        if self._next == len(self._times):
            raise StopAsyncIteration
        await asyncio.sleep(max(0.0, self._start + self._times[self._next] - time.perf_counter()))
        self._next += 1
        return self._next - 1


def limits(**config: float) -> TimeLimits:
    return TimeLimits(ServeConfig(**config), RequestRecord())


async def collected(limits: TimeLimits, *pauses: float, ping: float = 30) -> list[int | None]:
    return [item async for item in limits.pauses(Items(*pauses), ping=ping)]


async def test_what_is_quick_enough_passes() -> None:
    assert await collected(limits(), 0, 0.01) == [0, 1]
    assert await collected(limits(request_timeout=5, stream_timeout=5), 0, 0.01, 0) == [0, 1, 2]
    assert await limits(request_timeout=5).within(asyncio.sleep(0, "done")) == "done"


async def test_a_pause_that_is_too_long() -> None:
    with pytest.raises(RequestProblem) as caught:
        await collected(limits(stream_timeout=0.05), 0, 0, 60)
    assert "no token came for 0.05 seconds" in caught.value.message
    assert problem_of(caught.value).code == "timeout"
    assert problem_of(caught.value).headers["retry-after"]


async def test_the_first_may_take_longer_than_a_pause() -> None:
    assert await collected(limits(stream_timeout=1), 1.2, 0) == [0, 1]


async def test_a_whole_that_is_too_long() -> None:
    seen: list[int | None] = []

    async def collect() -> None:
        short = limits(request_timeout=0.1, stream_timeout=60)
        async for item in short.pauses(Items(0, *[0.02] * 1000), ping=30):
            seen.append(item)

    with pytest.raises(RequestProblem, match=r"longer than 0\.1 seconds"):
        await collect()
    assert 0 < len(seen) < 1000


async def test_a_place_that_does_not_come() -> None:
    with pytest.raises(RequestProblem, match=r"longer than 0\.05 seconds"):
        await limits(request_timeout=0.05).within(asyncio.sleep(60))


async def test_the_whole_begins_with_the_request() -> None:
    config, record = ServeConfig(request_timeout=0.05), RequestRecord()
    await asyncio.sleep(0.06)
    with pytest.raises(RequestProblem):
        await TimeLimits(config, record).within(asyncio.sleep(60))


async def test_a_quiet_time_is_told() -> None:
    """So that a comment can be sent, which keeps the connection open; nothing is lost over it."""
    told: list[int | None] = []
    quiet = asyncio.Event()

    class Slow(Items):
        async def __anext__(self) -> int:
            if self._next == 1:
                await quiet.wait()
            return await super().__anext__()

    async for item in limits().pauses(Slow(0, 0, 0), ping=0.05):
        told.append(item)
        if told.count(None) == 2:
            quiet.set()
    assert [item for item in told if item is not None] == [0, 1, 2]
    assert told[1:3] == [None, None]
    with pytest.raises(RequestProblem, match=r"no token came for 0\.1 seconds"):
        await collected(limits(stream_timeout=0.1), 0, 60, ping=0.03)
