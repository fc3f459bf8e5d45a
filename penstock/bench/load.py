"""Sends requests with a fixed concurrency (closed loop) or at a fixed rate (open loop)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.bench.http_client import HttpClient, IncompleteResponseError
from penstock.bench.outcome import Outcome, read_response

INTERRUPTED = "interrupted"
"""The error kind of requests that were running when the measurement was stopped."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Concurrency or rate of the requests."""

    concurrency: int | None = None
    """Concurrent requests: the next is sent when one ends. In an open loop the upper limit; None has no
    limit."""
    rate: float | None = None
    """Mean requests per second of a Poisson process; makes the load an open loop."""
    timeout: float = 600.0
    """Seconds after which a request counts as failed."""
    seed: int = 0


@dataclass
class Measurement:
    """The outcomes of a run, complete or interrupted."""

    outcomes: list[Outcome] = field(default_factory=list)
    """One outcome for each request that was sent or due."""
    started: float = 0.0
    ended: float = 0.0
    is_interrupted: bool = False
    round_trips: list[float] = field(default_factory=list)
    """Seconds of sequential small requests on one connection, before the load."""

    @property
    def seconds(self) -> float:
        """Seconds from the first request to the last response."""
        return self.ended - self.started


async def measure(
    client: HttpClient,
    path: str,
    bodies: Sequence[Mapping[str, object]],
    load: Load,
    *,
    stop: asyncio.Event | None = None,
    on_end: Callable[[Outcome], None] = lambda _: None,
) -> Measurement:
    """Send all requests and return when all have ended or ``stop`` is set.

    In an open loop, latencies count from the time when a request was due, so they include the delay that a
    slow server or client causes for later requests.

    Args:
        stop: ends the measurement; running requests are cancelled and counted as ``interrupted``.
        on_end: called with each request that has ended.
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
    """Return the seconds of each of several requests without computation, sent in sequence on one connection.

    They measure the overhead of server and network. The first request may open the connection and does not
    count. The list is shorter if the server does not respond; the load then reports the error.
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

    async def closed(self, bodies: Sequence[Mapping[str, object]]) -> None:
        """Send the next request when one ends."""
        waiting = iter(enumerate(bodies))

        async def user() -> None:
            for index, body in waiting:
                await self._send(index, body, time.perf_counter())

        count = min(self._load.concurrency or len(bodies), len(bodies))
        self._tasks = {asyncio.ensure_future(user()) for _ in range(count)}
        await asyncio.gather(*self._tasks)

    async def open(self, bodies: Sequence[Mapping[str, object]]) -> None:
        """Send each request when it is due."""
        assert self._load.rate is not None
        room = asyncio.Semaphore(self._load.concurrency or max(1, len(bodies)))

        async def one(index: int, body: Mapping[str, object], due: float) -> None:
            await self._send(index, body, due, room)

        for index, (body, delay) in enumerate(zip(bodies, self._arrivals(), strict=False)):
            due = self.measurement.started + delay
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self._tasks.add(asyncio.ensure_future(one(index, body, due)))
        await asyncio.gather(*self._tasks)

    async def leave(self) -> None:
        """Cancel the running requests."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _arrivals(self) -> Iterator[float]:
        """Yield the due times of a Poisson process, in seconds from the start."""
        draw, when = random.Random(self._load.seed), 0.0
        assert self._load.rate is not None
        while True:
            yield when
            when += draw.expovariate(self._load.rate)

    async def _send(
        self, index: int, body: Mapping[str, object], due: float, room: asyncio.Semaphore | None = None
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
            outcome.failed("timeout", f"no complete response after {self._load.timeout:g} s")
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
