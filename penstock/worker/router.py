"""The engine client of several workers: choice of the worker for each request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from penstock.errors import PenstockError
from penstock.pipelines.core import RequestContext
from penstock.worker.engine_client import EngineClient, EngineState
from penstock.worker.messages import WorkerInfo, WorkerStats
from penstock.worker.results import Generation

ChooseWorker: TypeAlias = Callable[[Sequence[EngineClient], RequestContext], EngineClient]

_STATES: tuple[EngineState, ...] = ("ready", "starting", "restarting", "stopping", "stopped")
"""The router has the first of these states that one of its workers has."""


def least_loaded(workers: Sequence[EngineClient], context: RequestContext) -> EngineClient:
    """Return the worker with the fewest outstanding requests. Workers that are not ready come last."""
    return min(workers, key=lambda worker: (worker.state != "ready", worker.num_outstanding))


class WorkerRouter:
    """Choose one of several workers for each request. An `EngineClient`.

    All workers run the same model with the same configuration. Each has its own queue and KV cache.

    Args:
        workers: the clients of the workers, at least one.
        choose: returns the worker that gets a request.
    """

    def __init__(self, workers: Sequence[EngineClient], choose: ChooseWorker = least_loaded) -> None:
        assert workers, "a router needs at least one worker"
        self._workers = tuple(workers)
        self._choose = choose

    @property
    def state(self) -> EngineState:
        """``ready`` if a worker is ready, else the state that is closest to it."""
        return min((worker.state for worker in self._workers), key=_STATES.index)

    @property
    def is_alive(self) -> bool:
        """Whether at least one worker is alive."""
        return any(worker.is_alive for worker in self._workers)

    @property
    def info(self) -> WorkerInfo:
        """The information of the first worker. The model and the limits of the others are the same."""
        return self._workers[0].info

    @property
    def stats(self) -> WorkerStats:
        """The sums of the workers' statistics."""
        all_stats = [worker.stats for worker in self._workers]
        names = WorkerStats.__struct_fields__
        return WorkerStats(**{name: sum(getattr(stats, name) for stats in all_stats) for name in names})

    @property
    def adapters(self) -> dict[str, str]:
        """The LoRA adapters that all workers have loaded, name to path."""
        first, *others = (worker.adapters for worker in self._workers)
        return {name: path for name, path in first.items() if all(name in other for other in others)}

    @property
    def num_outstanding(self) -> int:
        """The number of submitted requests that have not ended."""
        return sum(worker.num_outstanding for worker in self._workers)

    @property
    def max_outstanding(self) -> int:
        """The number of requests that may run and wait together."""
        return sum(worker.max_outstanding for worker in self._workers)

    @property
    def num_restarts(self) -> int:
        """The number of times that a worker ended unexpectedly."""
        return sum(worker.num_restarts for worker in self._workers)

    def submit(self, context: RequestContext) -> Generation:
        """Send a request to the worker that ``choose`` returns.

        Raises:
            UnavailableError: that worker is not ready.
            OverloadedError: its queue is full.
            InputError: it runs another request with the same id.
        """
        return self._choose(self._workers, context).submit(context)

    def request_ended(self) -> asyncio.Future[None]:
        """Return a future that completes when a submitted request has ended after this call."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sources = [worker.request_ended() for worker in self._workers]

        def complete(_: asyncio.Future[None]) -> None:
            if not ended.done():
                ended.set_result(None)

        for source in sources:
            source.add_done_callback(complete)
        ended.add_done_callback(lambda _: [source.remove_done_callback(complete) for source in sources])
        return ended

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter into all workers. If one fails, the others return to their previous state.

        Raises:
            PenstockError: the adapter cannot be loaded, or a worker is not ready.
        """
        previous: list[tuple[EngineClient, str | None]] = []
        try:
            for worker in self._workers:
                before = worker.adapters.get(name)
                await worker.load_adapter(name, path)
                previous.append((worker, before))
        except PenstockError:
            for worker, before in previous:
                with suppress(PenstockError):
                    await (worker.load_adapter(name, before) if before else worker.unload_adapter(name))
            raise

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter from all workers.

        Raises:
            PenstockError: no worker has the adapter, or a worker is not ready.
        """
        owners = [worker for worker in self._workers if name in worker.adapters]
        for worker in owners or self._workers[:1]:
            await worker.unload_adapter(name)

    def launch(self) -> None:
        """Launch all workers."""
        for worker in self._workers:
            worker.launch()

    async def start(self) -> None:
        """Start all workers and return when all are ready.

        Raises:
            PenstockError: the reason why a worker could not start. All workers are stopped then.
        """
        starts = [asyncio.create_task(worker.start()) for worker in self._workers]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.stop(0)
            raise

    async def stop(self, grace: float) -> None:
        """Stop accepting requests, wait up to ``grace`` seconds for running requests, and end the workers."""
        await asyncio.gather(*(worker.stop(grace) for worker in self._workers))
