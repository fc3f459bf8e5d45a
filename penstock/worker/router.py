"""`WorkerRouter`: the engine client of several workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from penstock.errors import InputError, OverloadedError, PenstockError, UnavailableError
from penstock.pipelines.core import RequestContext
from penstock.pipelines.core.cache_events import BlocksCleared, CacheEvent
from penstock.worker.engine_client import CacheListener, EngineClient, EngineState, SleepLevel
from penstock.worker.messages import WorkerInfo, WorkerStats
from penstock.worker.prefix_map import PrefixMap
from penstock.worker.results import Generation
from penstock.worker.routing import (
    PrefixAware,
    RequestLoad,
    RoutingPolicy,
    WorkerLoads,
    num_uncached_tokens,
    prompt_digests,
)

_LOG = logging.getLogger("penstock.worker")

_STATES_BY_PRECEDENCE: tuple[EngineState, ...] = (
    "ready",
    "asleep",
    "starting",
    "restarting",
    "stopping",
    "stopped",
)
"""States by precedence. The router has the first state in this list that any worker has."""
_POLL_INTERVAL = 0.02
"""Seconds between two checks whether the requests of a worker have ended."""
MAX_WORKERS = 1024
"""Maximum number of workers of a router."""


@dataclass(slots=True)
class _RoutedRequest:
    """The load of a running request on its worker, and the blocks that the request is expected to store."""

    load: RequestLoad
    expected_blocks: Sequence[bytes]
    """Digests of the blocks."""


class WorkerRouter:
    """The `EngineClient` of several workers, which chooses a worker for each request.

    All workers run the same model with the same configuration. Each worker has its own queue and KV cache.

    Args:
        workers: the clients of the workers, at least one.
        policy: chooses the worker of a request; by default a `PrefixAware`, created at the first request.
        make_worker: creates a new client for worker ``i``, for `reload`.
    """

    def __init__(
        self,
        workers: Sequence[EngineClient],
        policy: RoutingPolicy | None = None,
        make_worker: Callable[[int], EngineClient] | None = None,
    ) -> None:
        assert 1 <= len(workers) <= MAX_WORKERS, f"a router has 1 to {MAX_WORKERS} workers"
        self._workers = list(workers)
        self._policy = policy
        self._make_worker = make_worker
        self._loads = WorkerLoads(len(workers))
        self._running: dict[str, _RoutedRequest] = {}
        self._draining = 0  # bit set of the workers that get no new requests
        self._is_reloading = False
        self._listeners: list[CacheListener] = []
        self._num_restarts_of_replaced = 0  # restarts of workers that were replaced
        self.prefixes = PrefixMap()
        """The cached and the expected blocks of each worker."""
        if len(workers) > 1:
            for number, worker in enumerate(workers):
                worker.watch_cache(self._reporter(number, worker))

    # -- State -------------------------------------------------------------------------------------------

    @property
    def workers(self) -> Sequence[EngineClient]:
        """The clients of the workers, in order."""
        return self._workers

    @property
    def state(self) -> EngineState:
        """The first state of `_STATES_BY_PRECEDENCE` that any worker has: ``ready`` if a worker is ready."""
        return min((worker.state for worker in self._workers), key=_STATES_BY_PRECEDENCE.index)

    @property
    def is_alive(self) -> bool:
        """Whether at least one worker is alive."""
        return any(worker.is_alive for worker in self._workers)

    @property
    def info(self) -> WorkerInfo:
        """The information of the first worker, with the smallest ``max_length`` of all workers."""
        info = self._workers[0].info
        length = min(worker.info.max_length for worker in self._workers)
        return info if info.max_length == length else msgspec.structs.replace(info, max_length=length)

    @property
    def stats(self) -> WorkerStats:
        """The sums of the workers' statistics."""
        all_stats = [worker.stats for worker in self._workers]
        names = WorkerStats.__struct_fields__
        return WorkerStats(**{name: sum(getattr(stats, name) for stats in all_stats) for name in names})

    @property
    def adapters(self) -> dict[str, str]:
        """Name -> path in the first worker, for the LoRA adapters that all workers have loaded."""
        first_adapters, *other_adapters = [worker.adapters for worker in self._workers]
        return {
            name: path
            for name, path in first_adapters.items()
            if all(name in adapters for adapters in other_adapters)
        }

    @property
    def num_outstanding(self) -> int:
        """The number of submitted requests that have not ended."""
        return sum(worker.num_outstanding for worker in self._workers)

    @property
    def max_outstanding(self) -> int:
        """The maximum number of requests that run or wait."""
        return sum(worker.max_outstanding for worker in self._workers)

    @property
    def num_restarts(self) -> int:
        """The number of times that a worker ended unexpectedly or a restart failed."""
        return self._num_restarts_of_replaced + sum(worker.num_restarts for worker in self._workers)

    # -- Requests ----------------------------------------------------------------------------------------

    def submit(self, context: RequestContext) -> Generation:
        """Send a request to the worker that the policy chooses.

        If the chosen worker is not ready or its queue is full, the policy chooses another worker.

        Raises:
            UnavailableError: no worker is ready.
            OverloadedError: the queues of all ready workers are full.
            InputError: another request with the same id is running.
        """
        if len(self._workers) == 1:
            return self._workers[0].submit(context)
        if context.request_id in self._running:
            raise InputError(f"request {context.request_id} is running already: use unique request ids")
        all_workers = (1 << len(self._workers)) - 1
        workers = all_workers & ~self._draining or all_workers
        digests = prompt_digests(context, self._workers[0].info)
        error: PenstockError | None = None
        while workers:
            number = self._current_policy().choose(context, digests, self._loads, workers)
            try:
                generation = self._workers[number].submit(context)
            except OverloadedError as overload_error:
                error = overload_error
            except UnavailableError as unavailable_error:
                error = error or unavailable_error
            else:
                self._track(generation, context, number, digests)
                return generation
            workers &= ~(1 << number)
        assert error is not None
        raise error

    def _current_policy(self) -> RoutingPolicy:
        if self._policy is None:
            info = self._workers[0].info
            self._policy = PrefixAware(self.prefixes, info.block_size, info.max_batch_size)
        return self._policy

    def _track(
        self, generation: Generation, context: RequestContext, number: int, digests: Sequence[bytes]
    ) -> None:
        depth = self.prefixes.depth(number, digests)
        load = self._loads.add(number, num_uncached_tokens(context, self._workers[0].info, depth))
        expected_blocks = self.prefixes.expect(number, digests)
        self._running[generation.request_id] = _RoutedRequest(load, expected_blocks)
        generation.on_start = partial(self._loads.start, load)
        generation.on_end = partial(self._on_end, generation.request_id)

    def _on_end(self, request_id: str) -> None:
        request = self._running.pop(request_id)
        self._loads.end(request.load)
        self.prefixes.clear_expected(request.expected_blocks)

    def request_ended(self) -> asyncio.Future[None]:
        """Return a future that completes when a submitted request has ended after this call."""
        combined_future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        futures = [worker.request_ended() for worker in self._workers]

        def complete(_: asyncio.Future[None]) -> None:
            if not combined_future.done():
                combined_future.set_result(None)

        for future in futures:
            future.add_done_callback(complete)
        combined_future.add_done_callback(
            lambda _: [future.remove_done_callback(complete) for future in futures]
        )
        return combined_future

    def watch_cache(self, listener: CacheListener) -> None:
        """Register a listener for the events of all prefix caches. Must be called before the start."""
        self._listeners.append(listener)
        if len(self._workers) == 1:
            self._workers[0].watch_cache(self._reporter(0, self._workers[0]))

    def _reporter(self, number: int, worker: EngineClient) -> CacheListener:
        """Return the listener for a worker. Events of a replaced worker are dropped."""

        def report(_: int, events: Sequence[CacheEvent]) -> None:
            if self._workers[number] is worker:
                self._report(number, events)

        return report

    def _report(self, number: int, events: Sequence[CacheEvent]) -> None:
        self.prefixes.update(number, events)
        for listener in self._listeners:
            listener(number, events)

    # -- Adapters, caches, sleep and profiles ------------------------------------------------------------

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter into all workers. If one worker fails, the load is undone in the others.

        Raises:
            PenstockError: the adapter cannot be loaded, or a worker is not ready.
        """
        old_paths: list[tuple[EngineClient, str | None]] = []
        try:
            for worker in self._workers:
                old_path = worker.adapters.get(name)
                await worker.load_adapter(name, path)
                old_paths.append((worker, old_path))
        except PenstockError:
            for worker, old_path in old_paths:
                with suppress(PenstockError):
                    await (worker.load_adapter(name, old_path) if old_path else worker.unload_adapter(name))
            raise

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter from all workers.

        Raises:
            PenstockError: no worker has the adapter, or a worker is not ready.
        """
        owners = [worker for worker in self._workers if name in worker.adapters]
        for worker in owners or self._workers[:1]:
            await worker.unload_adapter(name)

    async def reset_prefix_cache(self) -> None:
        """Remove all cached prefixes of all workers."""
        await _gather(worker.reset_prefix_cache() for worker in self._workers)

    async def sleep(self, level: SleepLevel, grace: float) -> None:
        """Put all workers to sleep. If one worker cannot sleep, all workers are woken up.

        Raises:
            PenstockError: a worker is not ready, a reload runs, or a device cannot release this memory.
        """
        self._check_not_reloading()
        try:
            await _gather(worker.sleep(level, grace) for worker in self._workers)
        except PenstockError:
            for worker in self._workers:
                with suppress(PenstockError):
                    await worker.wake_up()
            raise

    async def wake_up(self) -> None:
        """Wake all workers up."""
        await _gather(worker.wake_up() for worker in self._workers)

    async def start_profile(self) -> None:
        """Start recording a profile of each worker, until `stop_profile`."""
        await _gather(worker.start_profile() for worker in self._workers)

    async def stop_profile(self) -> None:
        """Stop recording, and write the profiles."""
        await _gather(worker.stop_profile() for worker in self._workers)

    # -- Start, reload and stop --------------------------------------------------------------------------

    def launch(self) -> None:
        """Launch all workers."""
        for worker in self._workers:
            worker.launch()

    async def start(self) -> None:
        """Start all workers, and return when all workers are ready.

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

    async def reload(self, grace: float) -> None:
        """Replace the workers one after the other by new workers, which read the checkpoint again.

        A worker that is being replaced gets no new requests, finishes its running requests, and ends. Then
        its replacement starts. All other workers serve requests during this time. A single worker ends only
        after its replacement has started, so that both workers need memory at the same time. A replacement
        loads the adapters of the worker that it replaces.

        Args:
            grace: seconds after which the running requests of a worker fail.

        Raises:
            PenstockError: the model is asleep, another reload runs, or a replacement cannot start. With
                several workers, the worker whose replacement failed is then not available, and later workers
                are not replaced.
        """
        self._check_not_reloading()
        if self.state == "asleep":
            raise UnavailableError("the model is asleep: send POST /wake_up, then try again", retry_after=1)
        self._is_reloading = True
        try:
            for number in range(len(self._workers)):
                await self._replace(number, grace)
        finally:
            self._is_reloading = False

    async def _replace(self, number: int, grace: float) -> None:
        assert self._make_worker is not None, "this router has no make_worker"
        old_worker, new_worker = self._workers[number], self._make_worker(number)
        self._draining |= 1 << number
        try:
            if len(self._workers) > 1:
                await self._drain(number, grace)
                await old_worker.stop(0)
            if self._listeners or len(self._workers) > 1:
                new_worker.watch_cache(self._reporter(number, new_worker))
            await new_worker.start()
            try:
                await _copy_adapters(old_worker, new_worker)
            except BaseException:
                await new_worker.stop(0)
                raise
            self._workers[number] = new_worker
            self._report(number, [BlocksCleared()])
            self._num_restarts_of_replaced += old_worker.num_restarts
        finally:
            self._draining &= ~(1 << number)
        if len(self._workers) == 1:
            await old_worker.stop(grace)
        _LOG.info("worker %d is replaced", number)

    async def _drain(self, number: int, grace: float) -> None:
        """Wait until a worker has no requests, for at most ``grace`` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while self._workers[number].num_outstanding:
                    await asyncio.sleep(_POLL_INTERVAL)

    def _check_not_reloading(self) -> None:
        if self._is_reloading:
            raise UnavailableError("the model is being reloaded: try again later", retry_after=5)


async def _copy_adapters(old_worker: EngineClient, new_worker: EngineClient) -> None:
    """Load the adapters of a worker into its replacement, and unload all other adapters."""
    old_adapters = old_worker.adapters
    for name in new_worker.adapters.keys() - old_adapters.keys():
        await new_worker.unload_adapter(name)
    for name, path in old_adapters.items():
        if new_worker.adapters.get(name) != path:
            await new_worker.load_adapter(name, path)


async def _gather(calls: Iterable[Coroutine[None, None, None]]) -> None:
    """Run calls concurrently, wait for all, and raise the first error."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if result is not None:
            raise result
