"""Sending the requests: so many at a time (a closed loop), or at a rate whatever comes back (an open one)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from penstock.bench.http_client import HttpClient, IncompleteResponseError
from penstock.bench.outcome import Outcome, read_response

INTERRUPTED = "interrupted"
"""The kind of error of a request that the measurement did not wait for."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """How requests follow each other."""

    concurrency: int | None = None
    """Requests at a time: the next is sent when one ends. In an open loop most at a time; by default any."""
    rate: float | None = None
    """Requests a second, on average, at times that are independent of each other: an open loop."""
    timeout: float = 600.0
    """Seconds until a request is given up."""
    seed: int = 0


@dataclass
class Measurement:
    """What came of a run, also of one that was ended before its time."""

    outcomes: list[Outcome] = field(default_factory=list)
    """Of every request that was sent, or whose time had come."""
    started: float = 0.0
    ended: float = 0.0
    is_interrupted: bool = False
    round_trips: list[float] = field(default_factory=list)
    """Seconds of small requests, one after another on one connection, before the load."""

    @property
    def seconds(self) -> float:
        """From the first request to the last answer."""
        return self.ended - self.started


async def measure(
    client: HttpClient,
    path: str,
    bodies: Sequence[Mapping[str, Any]],
    load: Load,
    *,
    stop: asyncio.Event | None = None,
    on_end: Callable[[Outcome], None] = lambda _: None,
) -> Measurement:
    """Sends all requests, and returns when all have ended or ``stop`` is set.

    In an open loop, latencies count from the moment when a request was due. A server that falls behind, or
    this client, makes later requests wait, and that waiting is part of what a user would see.

    Args:
        stop: ends the measurement; requests that run are left, and counted as ``interrupted``.
        on_end: told of each request that ended.
    """
    run = _Run(client, path, load, on_end)
    sending = asyncio.ensure_future(run.open(bodies) if load.rate else run.closed(bodies))
    stopping = asyncio.ensure_future((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
        run.measurement.is_interrupted = not sending.done()
    finally:
        stopping.cancel()
        sending.cancel()
        await asyncio.wait((sending, stopping))
        await run.leave()
    if not sending.cancelled():
        sending.result()
    run.measurement.ended = time.perf_counter()
    return run.measurement


async def round_trips(client: HttpClient, path: str, count: int) -> list[float]:
    """Returns the seconds of requests that compute nothing, one after another on one connection.

    They show what the server and the network add to each request. The first one, which may open the
    connection, does not count. A server that does not answer has fewer; the load will say why.
    """
    seconds: list[float] = []
    with suppress(OSError, IncompleteResponseError):
        for _ in range(count + 1):
            before = time.perf_counter()
            await client.get(path)
            seconds.append(time.perf_counter() - before)
    return seconds[1:]


class _Run:
    def __init__(self, client: HttpClient, path: str, load: Load, on_end: Callable[[Outcome], None]) -> None:
        self._client = client
        self._path = path
        self._load = load
        self._on_end = on_end
        self._tasks: set[asyncio.Task[None]] = set()
        self.measurement = Measurement(started=time.perf_counter())

    async def closed(self, bodies: Sequence[Mapping[str, Any]]) -> None:
        """The next is sent when one ends."""
        waiting = iter(enumerate(bodies))

        async def user() -> None:
            for index, body in waiting:
                await self._send(index, body, time.perf_counter())

        count = min(self._load.concurrency or len(bodies), len(bodies))
        self._tasks = {asyncio.ensure_future(user()) for _ in range(count)}
        await asyncio.gather(*self._tasks)

    async def open(self, bodies: Sequence[Mapping[str, Any]]) -> None:
        """Each is sent when its time has come."""
        assert self._load.rate is not None
        room = asyncio.Semaphore(self._load.concurrency or max(1, len(bodies)))

        async def one(index: int, body: Mapping[str, Any], due: float) -> None:
            await self._send(index, body, due, room)

        for index, (body, delay) in enumerate(zip(bodies, self._arrivals(), strict=False)):
            due = self.measurement.started + delay
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self._tasks.add(asyncio.ensure_future(one(index, body, due)))
        await asyncio.gather(*self._tasks)

    async def leave(self) -> None:
        """Ends what still runs."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _arrivals(self) -> Iterator[float]:
        """Seconds from the start, of a Poisson process."""
        draw, when = random.Random(self._load.seed), 0.0
        assert self._load.rate is not None
        while True:
            yield when
            when += draw.expovariate(self._load.rate)

    async def _send(
        self, index: int, body: Mapping[str, Any], due: float, room: asyncio.Semaphore | None = None
    ) -> None:
        outcome = Outcome(index, due)
        self.measurement.outcomes.append(outcome)
        try:
            async with asyncio.timeout(self._load.timeout), room or _NO_LIMIT:
                outcome.sent = time.perf_counter()
                answer = await self._client.post(self._path, body)
            outcome.ended = answer.pieces[-1][0] if answer.pieces else time.perf_counter()
            read_response(outcome, answer)
        except TimeoutError:
            outcome.failed("timeout", f"no end after {self._load.timeout:g} s")
        except IncompleteResponseError as error:
            outcome.failed("broken connection", str(error))
        except OSError as error:
            outcome.failed("no connection", str(error))
        except asyncio.CancelledError:
            outcome.failed(INTERRUPTED)
            raise
        finally:
            outcome.ended = outcome.ended or time.perf_counter()
            self._on_end(outcome)


class _NoLimit:
    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...


_NO_LIMIT = _NoLimit()
