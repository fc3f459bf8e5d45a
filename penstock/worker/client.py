"""`WorkerClient`: the engine client of one worker process."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from itertools import count

from penstock.errors import InputError, OverloadedError, PenstockError, UnavailableError
from penstock.pipelines.core import RequestContext
from penstock.pipelines.core.cache_events import BlocksCleared, CacheEvent
from penstock.worker.engine_client import CacheListener, EngineClient, EngineState, SleepLevel
from penstock.worker.messages import (
    CallResult,
    Cancel,
    Control,
    ControlAction,
    LoadAdapter,
    Pong,
    StepResults,
    Submit,
    UnloadAdapter,
    WatchCache,
    WorkerInfo,
    WorkerMessage,
    WorkerStats,
)
from penstock.worker.process import WorkerRuntime
from penstock.worker.results import Generation
from penstock.worker.supervisor import WorkerSupervisor

_LOG = logging.getLogger("penstock.worker")

_IDLE_POLL_INTERVAL = 0.02
"""Seconds between two checks whether all requests have ended, before the worker stops or sleeps."""


class WorkerClient:
    """The `EngineClient` of one worker. Sends requests, and passes results to their `Generation`.

    A `WorkerSupervisor` starts, monitors and restarts the worker.

    Args:
        factory: loads the model in the worker's process; picklable, unless ``in_thread``.
        in_thread: whether the worker runs in a thread of this process, for tests.
        max_queue_size: maximum number of requests that wait for a slot in the batch. Default: 4 batches, at
            least 64. Clients with less than one batch of outstanding requests may exceed the limit by at most
            one batch in total.
        hang_limit: see `WorkerSupervisor`.
        memory_limit: see `WorkerSupervisor`.
        is_asleep: whether the worker is asleep at first. `wake_up` then starts the worker, not `start`.
    """

    def __init__(
        self,
        factory: Callable[[], WorkerRuntime],
        *,
        in_thread: bool = False,
        max_queue_size: int | None = None,
        hang_limit: float = 20.0,
        memory_limit: int | None = None,
        is_asleep: bool = False,
    ) -> None:
        self._supervisor = WorkerSupervisor(
            factory,
            on_report=self._on_report,
            on_start=self._restore,
            on_end=self._on_end,
            in_thread=in_thread,
            hang_limit=hang_limit,
            memory_limit=memory_limit,
        )
        self._supervisor.is_asleep = is_asleep
        self._max_queue_size = max_queue_size
        self._call_ids = count()
        self._calls: dict[int, asyncio.Future[PenstockError | None]] = {}
        self._generations: dict[str, Generation] = {}
        self._cancelled: set[str] = set()  # ids of requests whose cancellation the worker has not confirmed
        self._client_ids: dict[str, str] = {}  # request id -> client id, for outstanding requests
        self._changed_adapters: dict[str, str | None] = {}
        """Adapters loaded or unloaded since the first start: name -> path; None if unloaded."""
        self._request_ended: asyncio.Future[None] | None = None
        self._listeners: list[CacheListener] = []
        self._stats = WorkerStats()
        self.num_late_results = 0
        """The number of results that were discarded because their request had already ended in the server."""

    # -- State -------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """The state of the worker. Only a ``ready`` worker accepts requests."""
        return self._supervisor.state

    @property
    def is_alive(self) -> bool:
        """Whether the worker is alive, see `WorkerSupervisor.is_alive`."""
        return self._supervisor.is_alive

    @property
    def info(self) -> WorkerInfo:
        """The information that the newest worker reported."""
        return self._supervisor.info

    @property
    def stats(self) -> WorkerStats:
        """The newest statistics of the worker, all 0 after the worker has ended."""
        return self._stats

    @property
    def adapters(self) -> dict[str, str]:
        """Name -> path of the loaded LoRA adapters; empty before the first start."""
        all_adapters = dict(self._supervisor.initial_adapters) | self._changed_adapters
        return {name: path for name, path in all_adapters.items() if path is not None}

    @property
    def num_outstanding(self) -> int:
        """The number of requests that the worker has not ended, including cancelled requests."""
        return len(self._generations) + len(self._cancelled)

    @property
    def max_outstanding(self) -> int:
        """The maximum number of requests that run or wait, without the additional batch of `_has_room`."""
        size = self.info.max_batch_size
        return size + (max(64, 4 * size) if self._max_queue_size is None else self._max_queue_size)

    @property
    def workers(self) -> Sequence[EngineClient]:
        """This client alone."""
        return (self,)

    @property
    def num_restarts(self) -> int:
        """The number of times that the worker ended unexpectedly or a restart failed."""
        return self._supervisor.num_restarts

    @property
    def failure(self) -> PenstockError | None:
        """The error of the last start if the worker is no longer restarted; otherwise None."""
        return self._supervisor.failure

    # -- Requests ----------------------------------------------------------------------------------------

    def submit(self, context: RequestContext) -> Generation:
        """Send a request to the worker. Never blocks.

        Raises:
            UnavailableError: the worker is not ready.
            OverloadedError: the queue is full.
            InputError: another request with the same id is outstanding.
        """
        self._supervisor.check_ready()
        if not self._has_room(context.client_id):
            raise OverloadedError(
                f"{self.num_outstanding} requests are running or waiting, and the queue is full: try again"
            )
        request_id = context.request_id
        if request_id in self._generations or request_id in self._cancelled:
            raise InputError(f"request {request_id} is running already: use a unique id for each request")
        self._supervisor.send(Submit(context))
        self._client_ids[request_id] = context.client_id
        generation = self._generations[request_id] = Generation(request_id, self._cancel)
        return generation

    def _has_room(self, client_id: str) -> bool:
        """Return whether a client may submit another request.

        If one client fills the queue, other clients can still submit requests: beyond the limit, the queue
        has room for one more batch of requests. Only a client with less than one batch of outstanding
        requests may use this room.
        """
        if self.num_outstanding < self.max_outstanding:
            return True
        batch_size = self.info.max_batch_size
        num_requests = sum(submitter == client_id for submitter in self._client_ids.values())
        return num_requests < batch_size and self.num_outstanding < self.max_outstanding + batch_size

    def _cancel(self, request_id: str) -> None:
        """Cancel a request that has not ended. Called by its `Generation`."""
        del self._generations[request_id]
        self._cancelled.add(request_id)
        self._supervisor.send(Cancel(request_id))

    def request_ended(self) -> asyncio.Future[None]:
        """Return a future that completes when a submitted request has ended after this call."""
        if self._request_ended is None:
            self._request_ended = asyncio.get_running_loop().create_future()
        return self._request_ended

    def _complete_request_ended(self) -> None:
        future, self._request_ended = self._request_ended, None
        if future is not None and not future.done():
            future.set_result(None)

    # -- Adapters ----------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter; see `EngineClient.load_adapter`."""
        self._supervisor.check_ready()
        await self._call(LoadAdapter(next(self._call_ids), name, path))
        self._changed_adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter; see `EngineClient.unload_adapter`."""
        self._supervisor.check_ready()
        await self._call(UnloadAdapter(next(self._call_ids), name))
        self._changed_adapters[name] = None

    # -- Caches, sleep and profiles ----------------------------------------------------------------------

    def watch_cache(self, listener: CacheListener) -> None:
        """Register a listener for the events of the prefix cache. Must be called before the start."""
        self._listeners.append(listener)

    async def reset_prefix_cache(self) -> None:
        """Remove all cached prefixes. Running requests keep their blocks."""
        await self._control("reset_prefix_cache")

    async def start_profile(self) -> None:
        """Start recording a profile of the worker, until `stop_profile`."""
        await self._control("start_profile")

    async def stop_profile(self) -> None:
        """Stop recording, and write the profile."""
        await self._control("stop_profile")

    async def sleep(self, level: SleepLevel, grace: float) -> None:
        """Reject new requests, wait for running requests, and release memory; see `EngineClient.sleep`.

        Does nothing if the worker is asleep.

        Raises:
            PenstockError: the worker is not ready, or its device cannot release this memory.
        """
        supervisor = self._supervisor
        if supervisor.is_asleep:
            return
        supervisor.check_ready()
        supervisor.is_asleep = True
        try:
            await self._wait_until_idle(grace)
            for generation in list(self._generations.values()):
                self._cancel(generation.request_id)
                generation.fail(UnavailableError("the model was put to sleep", retry_after=1))
            if level == 1:
                # The worker confirms the cancellations after its step. If the worker ends, all requests end.
                await self._wait_until_idle(math.inf)
                await self._call(Control(next(self._call_ids), "discard_cache"))
            else:
                self._fail_all("the model was put to sleep")
                supervisor.begin_stop()
                await supervisor.finish_stop()
                self._on_end("the model was put to sleep")
        except BaseException:
            supervisor.is_asleep = False
            raise

    async def wake_up(self) -> None:
        """Accept requests again. Start the worker if needed. Does nothing if the worker is not asleep.

        Raises:
            PenstockError: the worker cannot start, and is still asleep.
        """
        if self._supervisor.is_asleep and not self._supervisor.is_running:
            await self._supervisor.start()
        self._supervisor.is_asleep = False

    async def reload(self, grace: float) -> None:
        """Replace the worker, and reject requests meanwhile. If the worker is asleep, only wake it up."""
        await self.sleep(2, grace)
        await self.wake_up()

    async def _wait_until_idle(self, seconds: float) -> None:
        """Wait until no request is outstanding, for at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while self.num_outstanding and time.monotonic() < deadline:
            await asyncio.sleep(_IDLE_POLL_INTERVAL)

    async def _control(self, action: ControlAction) -> None:
        self._supervisor.check_ready()
        await self._call(Control(next(self._call_ids), action))

    async def _call(self, command: LoadAdapter | UnloadAdapter | Control) -> None:
        """Send a command and wait for its result."""
        result: asyncio.Future[PenstockError | None] = asyncio.get_running_loop().create_future()
        self._calls[command.call_id] = result
        self._supervisor.send(command)
        try:
            error = await result
        finally:
            self._calls.pop(command.call_id, None)
        if error is not None:
            raise error

    async def _restore(self) -> None:
        """Prepare a worker after each start: request its cache events, and restore the changed adapters."""
        if self._listeners:
            self._supervisor.send(WatchCache())
        initial_names = {name for name, _ in self.info.adapters}
        for name, path in list(self._changed_adapters.items()):
            try:
                if path is not None:
                    await self._call(LoadAdapter(next(self._call_ids), name, path))
                elif name in initial_names:
                    await self._call(UnloadAdapter(next(self._call_ids), name))
            except PenstockError as error:
                _LOG.error("adapter %s could not be restored: %s", name, error)
                self._changed_adapters[name] = None

    # -- Start and stop ----------------------------------------------------------------------------------

    def launch(self) -> None:
        """Launch the worker. Needs no event loop. Does nothing if it is launched already."""
        self._supervisor.launch()

    async def start(self) -> None:
        """Launch the worker if needed, and return when it is ready.

        Raises:
            PenstockError: the reason why the worker could not start.
        """
        await self._supervisor.start()

    async def stop(self, grace: float) -> None:
        """Stop accepting requests, wait up to ``grace`` seconds for running requests, and end the worker."""
        if not self._supervisor.begin_stop():
            return
        await self._wait_until_idle(grace)
        self._fail_all("the server is shutting down")
        await self._supervisor.finish_stop()

    # -- Reports -----------------------------------------------------------------------------------------

    def _on_report(self, report: WorkerMessage) -> None:
        match report:
            case StepResults():
                self._stats = report.stats
                if report.cache_events:
                    self._report_cache(report.cache_events)
                self._dispatch(report)
            case Pong():
                self._stats = report.stats
            case CallResult():
                result = self._calls.pop(report.call_id, None)
                if result is not None and not result.done():
                    result.set_result(None if report.error is None else report.error.error())

    def _dispatch(self, report: StepResults) -> None:
        """Pass the results of a step to their generations."""
        for admission in report.admissions:
            generation = self._generations.get(admission.request_id)
            if generation is not None:
                generation.admit(admission.num_cached_tokens)
        for result in report.results:
            request_id = result.request_id
            generation = self._generations.get(request_id)
            if generation is None:
                self.num_late_results += 1
            else:
                generation.add(result)
            if result.status.is_done:
                self._forget(request_id)
        for failure in report.failures:
            generation = self._generations.get(failure.request_id)
            if generation is not None:
                generation.fail(failure.error.error())
            self._forget(failure.request_id)
        for request_id in report.cancelled:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._generations.pop(request_id, None)
        self._cancelled.discard(request_id)
        self._client_ids.pop(request_id, None)
        self._complete_request_ended()

    def _on_end(self, reason: str) -> None:
        self._fail_all(reason)
        self._stats = WorkerStats()
        self._report_cache([BlocksCleared()])

    def _report_cache(self, events: Sequence[CacheEvent]) -> None:
        for listener in self._listeners:
            listener(0, events)

    def _fail_all(self, reason: str) -> None:
        """End all requests and calls with an `UnavailableError`."""
        generations, self._generations = self._generations, {}
        self._cancelled.clear()
        self._client_ids.clear()
        self._complete_request_ended()
        retry_after = self._supervisor.retry_after
        for generation in generations.values():
            generation.fail(UnavailableError(reason, retry_after=retry_after))
        for result in self._calls.values():
            if not result.done():
                result.set_result(UnavailableError(reason, retry_after=retry_after))
