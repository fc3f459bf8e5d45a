"""Sends the requests of a load test with a fixed concurrency (closed loop) or at a fixed rate (open loop)."""

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
"""`Outcome.error` of requests that were running when the measurement was stopped."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The concurrency or the rate of the requests."""

    concurrency: int | None = None
    """Number of concurrent requests.

    In a closed loop, the next request is sent when a request ends. In an open loop, this number is the
    maximum, and further due requests wait. None for no limit.
    """
    rate: float | None = None
    """Mean number of requests per second (a Poisson process). With a rate, the load is an open loop."""
    timeout: float = 600.0
    """Number of seconds after which a request counts as failed. In an open loop, the seconds include the wait
    of a due request because of ``concurrency``."""
    seed: int = 0


@dataclass
class Measurement:
    """The outcomes of a complete or interrupted run. Times are in seconds of ``time.perf_counter``."""

    outcomes: list[Outcome] = field(default_factory=list)
    """One outcome for each request that was sent or was due."""
    start_time: float = 0.0
    end_time: float = 0.0
    is_interrupted: bool = False
    round_trips: list[float] = field(default_factory=list)
    """Round-trip times in seconds, measured before the load test by the function `round_trips`."""

    @property
    def seconds(self) -> float:
        """Seconds from the start to the end of the run."""
        return self.end_time - self.start_time


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

    In an open loop, latencies are measured from the time when a request was due. Latencies therefore include
    the delay of requests that are sent late because the server or the client is slow.

    Args:
        client: the client of the server.
        path: the path of the endpoint.
        bodies: the bodies of the requests.
        load: the concurrency or the rate.
        stop: stops the measurement when it is set. All requests that have been sent or are due and have not
            ended are cancelled and counted as ``interrupted``.
        on_end: called with the outcome of each request that has ended or is cancelled.
    """
    run = _Run(client, path, load, on_end)
    send_task = asyncio.ensure_future(run.run_open_loop(bodies) if load.rate else run.run_closed_loop(bodies))
    stop_task = asyncio.ensure_future((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait((send_task, stop_task), return_when=asyncio.FIRST_COMPLETED)
        run.measurement.is_interrupted = not send_task.done()
    finally:
        stop_task.cancel()
        send_task.cancel()
        await asyncio.wait((send_task, stop_task))
        await run.cancel_requests()
    if not send_task.cancelled():
        send_task.result()
    run.measurement.end_time = time.perf_counter()
    return run.measurement


async def round_trips(client: HttpClient, path: str, count: int) -> list[float]:
    """Return the seconds of ``count`` GET requests, which are sent one after another.

    The route ``path`` should need no computation, so that the seconds are the overhead of server and network.
    An additional first request is not counted, because it may open the connection. The list ends at the first
    request that fails; the load test itself reports the error.
    """
    seconds: list[float] = []
    with suppress(OSError, IncompleteResponseError):
        for _ in range(count + 1):
            start = time.perf_counter()
            await client.get(path)
            seconds.append(time.perf_counter() - start)
    return seconds[1:]


class _Run:
    def __init__(self, client: HttpClient, path: str, load: Load, on_end: Callable[[Outcome], None]) -> None:
        self._client = client
        self._path = path
        self._load = load
        self._on_end = on_end
        self._tasks: set[asyncio.Task[None]] = set()
        self.measurement = Measurement(start_time=time.perf_counter())

    async def run_closed_loop(self, bodies: Sequence[Mapping[str, object]]) -> None:
        """Send all requests. The next request is sent when a request ends."""
        unsent_bodies = iter(enumerate(bodies))

        async def send_requests() -> None:
            for index, body in unsent_bodies:
                await self._send(index, body, time.perf_counter())

        count = min(self._load.concurrency or len(bodies), len(bodies))
        self._tasks = {asyncio.ensure_future(send_requests()) for _ in range(count)}
        await asyncio.gather(*self._tasks)

    async def run_open_loop(self, bodies: Sequence[Mapping[str, object]]) -> None:
        """Send all requests, each when it is due."""
        assert self._load.rate is not None
        slots = asyncio.Semaphore(self._load.concurrency or max(1, len(bodies)))
        for index, (body, delay) in enumerate(zip(bodies, self._arrivals(), strict=False)):
            due = self.measurement.start_time + delay
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self._tasks.add(asyncio.ensure_future(self._send(index, body, due, slots)))
        await asyncio.gather(*self._tasks)

    async def cancel_requests(self) -> None:
        """Cancel the running requests."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _arrivals(self) -> Iterator[float]:
        """Yield the due times of a Poisson process, in seconds from the start."""
        generator, due = random.Random(self._load.seed), 0.0
        assert self._load.rate is not None
        while True:
            yield due
            due += generator.expovariate(self._load.rate)

    async def _send(
        self, index: int, body: Mapping[str, object], due: float, slots: asyncio.Semaphore | None = None
    ) -> None:
        outcome = Outcome(index, due)
        self.measurement.outcomes.append(outcome)
        try:
            async with asyncio.timeout(self._load.timeout), slots or _NO_LIMIT:
                outcome.sent_time = time.perf_counter()
                answer = await self._client.post(self._path, body)
            outcome.end_time = answer.pieces[-1][0] if answer.pieces else time.perf_counter()
            read_response(outcome, answer)
        except TimeoutError:
            outcome.record_error("timeout", f"no complete response after {self._load.timeout:g} s")
        except IncompleteResponseError as error:
            outcome.record_error("broken connection", str(error))
        except OSError as error:
            outcome.record_error("no connection", str(error))
        except asyncio.CancelledError:
            outcome.record_error(INTERRUPTED)
            raise
        finally:
            outcome.end_time = outcome.end_time or time.perf_counter()
            self._on_end(outcome)


class _NoLimit:
    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...


_NO_LIMIT = _NoLimit()
