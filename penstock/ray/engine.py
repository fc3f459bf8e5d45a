"""`RayEngine`: the engine client whose replicas run on a Ray cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from penstock.errors import (
    InputError,
    OverloadedError,
    PenstockError,
    UnavailableError,
    UnsupportedFeatureError,
)
from penstock.pipelines.core import RequestContext, TextContext
from penstock.ray.messages import ReplicaReport, report_decoder, results_decoder
from penstock.ray.replica_choice import ReplicaChoice
from penstock.worker.engine_client import CacheListener, EngineClient, EngineState, SleepLevel
from penstock.worker.messages import (
    Submit,
    TextResult,
    WorkerInfo,
    WorkerStats,
    command_decoder,
    command_encoder,
)
from penstock.worker.results import Generation

_LOG = logging.getLogger("penstock.ray")

_MAX_ATTEMPTS = 10  # per request
_FIRST_DELAY, _MAX_DELAY = 0.1, 5.0
"""First and maximum delay between two attempts of a request, in seconds. The delay doubles per attempt."""
_POLL_SECONDS = 2.0
"""Seconds between two reads of the replicas' statistics."""
_MAX_MISSING_REPORTS = 64
"""Maximum number of replicas that no longer answer. If there are more, the oldest count as ended."""
_GAUGES = (
    "num_running",
    "num_waiting",
    "num_blocks",
    "num_used_blocks",
    "num_cached_blocks",
    "last_batch_size",
    "last_batch_tokens",
)
"""The fields of `WorkerStats` that are current values. All other fields are totals since the start."""


class ReplicaLostError(Exception):
    """The replica of a request has ended, cannot be reached, or is not available."""


class Replicas(Protocol):
    """The replicas of a deployment."""

    def generate(self, frames: Sequence[bytes], preferred_replica: str) -> AsyncIterator[bytes]:
        """Send a request to a replica and yield its results (`EngineReplica.generate`).

        Closing the iterator cancels the request.

        Args:
            frames: the encoded request.
            preferred_replica: the name of a replica; empty for no preference. If this replica is full or has
                ended, Ray Serve sends the request to another replica.

        Raises:
            ReplicaLostError: the replica has ended or cannot be reached.
            UnavailableError: the replica raised an exception.
        """
        ...

    async def reports(self, positions: Mapping[str, int]) -> list[bytes]:
        """Return the encoded `ReplicaReport` of each running replica. Waits until a replica runs.

        For ``positions``, see `EngineReplica.report`. Raises `ReplicaLostError` if no report can be read.
        """
        ...

    async def reset_prefix_caches(self) -> None:
        """Clear the prefix caches of all replicas."""
        ...


class RayEngine:
    """The `EngineClient` of replicas on a Ray cluster.

    If the replica of a request ends, another replica continues the request. The other replica recomputes the
    KV of the prompt and of the tokens generated so far, as after a preemption. Sampling depends only on the
    seed and the position, so the output is the same as on a single replica, except for rounding differences.
    A request with images, a grammar or log probabilities, or of a task other than text generation, is
    repeated only if it has no output yet.

    Args:
        replicas: the replicas.
        max_outstanding: maximum number of running and waiting requests of this HTTP process.
        num_ingresses: the number of HTTP processes that send requests to the same replicas.
    """

    def __init__(self, replicas: Replicas, max_outstanding: int, num_ingresses: int = 1) -> None:
        self._replicas = replicas
        self._choice = ReplicaChoice(num_ingresses)
        self.max_outstanding = max_outstanding
        """The maximum number of running and waiting requests of this HTTP process."""
        self.state: EngineState = "starting"
        """The state of the engine. It is ``ready`` between `start` and `stop`."""
        self.adapters: dict[str, str] = {}
        """Name of each LoRA adapter in the configuration -> path."""
        self._info: WorkerInfo | None = None
        self._reports: dict[str, ReplicaReport] = {}
        self._missing_reports: dict[str, ReplicaReport] = {}  # last reports of replicas that no longer answer
        self._ended_stats = WorkerStats()  # totals of replicas that have ended
        self._num_ended_restarts = 0
        self._generations: dict[str, Generation] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._polling_task: asyncio.Task[None] | None = None
        self._request_ended: asyncio.Future[None] | None = None
        self._encode, self._decode = command_encoder(), results_decoder()
        self._decode_report = report_decoder()
        self.num_resumed = 0
        """How often a request was sent again because its replica was lost or sent no final result."""

    # -- State -------------------------------------------------------------------------------------------

    @property
    def workers(self) -> Sequence[EngineClient]:
        """A list of this client alone. Replicas are not listed, because their set changes."""
        return [self]

    @property
    def is_alive(self) -> bool:
        """Whether a replica has answered the last poll."""
        return bool(self._reports)

    @property
    def info(self) -> WorkerInfo:
        """The description of the model and its limits, as reported by the first replica."""
        assert self._info is not None, "the engine has not started"
        return self._info

    @property
    def stats(self) -> WorkerStats:
        """The sums of all replicas' statistics at the last poll, with the totals of ended replicas."""
        all_stats = [self._ended_stats, *(report.stats for report in self._reports.values())]
        names = WorkerStats.__struct_fields__
        sums = WorkerStats(**{name: sum(getattr(stats, name) for stats in all_stats) for name in names})
        for report in self._missing_reports.values():
            _add_totals(sums, report.stats)
        return sums

    @property
    def num_outstanding(self) -> int:
        """The number of submitted requests that have not ended."""
        return len(self._generations)

    @property
    def num_restarts(self) -> int:
        """The sum of `ReplicaReport.num_restarts` of all replicas, including replicas that have ended."""
        reports = (*self._reports.values(), *self._missing_reports.values())
        return self._num_ended_restarts + sum(report.num_restarts for report in reports)

    # -- Requests ----------------------------------------------------------------------------------------

    def submit(self, context: RequestContext) -> Generation:
        """Send a request to a replica. Return its `Generation`.

        Raises:
            UnavailableError: the engine has not started, is stopping or has stopped.
            OverloadedError: too many requests are running and waiting.
            InputError: another request with the same id is running.
        """
        if self.state != "ready":
            raise UnavailableError(f"the replicas are {self.state}")
        request_id = context.request_id
        if request_id in self._generations:
            raise InputError(f"request {request_id} is running already: give each request its own id")
        if self.num_outstanding >= self.max_outstanding:
            raise OverloadedError(
                f"{self.num_outstanding} requests are running or waiting, and the queue is full: try again"
            )
        generation = self._generations[request_id] = Generation(request_id, self._cancel)
        frames = [bytes(frame) for frame in self._encode(Submit(context))]
        task = asyncio.get_running_loop().create_task(self._run(generation, frames, context))
        self._tasks[request_id] = task
        task.add_done_callback(lambda task: self._forget(task, generation))
        return generation

    async def _run(self, generation: Generation, frames: list[bytes], context: RequestContext) -> None:
        """Run a request. If its replica is lost, continue the request on another replica."""
        tokens: list[int] = []
        lost_replicas: set[str] = set()
        has_output, delay, reason = False, _FIRST_DELAY, ""
        for attempt in range(_MAX_ATTEMPTS):
            if attempt:
                request_frames = frames if not has_output else _continued_request(frames, tokens)
                if request_frames is None:
                    break
                await asyncio.sleep(delay)
                delay = min(2 * delay, _MAX_DELAY)
                self.num_resumed += 1
                _LOG.warning("request %s continues on another replica: %s", generation.request_id, reason)
            else:
                request_frames = frames
            assignment = self._choice.assign(context, lost_replicas)
            replica = "" if assignment is None else assignment.name
            try:
                async for data in self._replicas.generate(request_frames, replica):
                    message = self._decode(data)
                    if message.error is not None:
                        error = message.error.error()
                        if isinstance(error, UnavailableError):
                            raise ReplicaLostError(str(error))
                        self._fail(generation, error)
                        return
                    if not has_output:
                        generation.admit(message.num_cached_tokens)
                    if assignment is not None:
                        self._choice.start(assignment)
                    has_output = True
                    for result in message.results:
                        if isinstance(result, TextResult):
                            tokens += result.tokens
                        generation.add(result)
                        if generation.is_done:
                            self._end(generation)
                if generation.is_done:
                    return
                reason = "the replica sent no final result"
            except ReplicaLostError as error:
                reason = str(error)
                lost_replicas.add(replica)
            except PenstockError as error:
                self._fail(generation, error)
                return
            finally:
                if assignment is not None:
                    self._choice.end(assignment)
        self._fail(generation, UnavailableError(f"the replica of the request was lost: {reason}"))

    def _cancel(self, request_id: str) -> None:
        """Cancel a request that has not ended. Called by its `Generation`."""
        self._tasks[request_id].cancel()
        self._end(self._generations[request_id])

    def _fail(self, generation: Generation, error: PenstockError) -> None:
        generation.fail(error)
        self._end(generation)

    def _forget(self, task: asyncio.Task[None], generation: Generation) -> None:
        """Remove the finished task of a request. If the task raised an error, the request fails."""
        if self._tasks.get(generation.request_id) is task:
            del self._tasks[generation.request_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("request %s failed", generation.request_id, exc_info=error)
            if not generation.is_done:
                self._fail(generation, UnavailableError("the request could not be sent to a replica"))

    def _end(self, generation: Generation) -> None:
        """Remove a request that has ended."""
        if self._generations.pop(generation.request_id, None) is None:
            return
        future, self._request_ended = self._request_ended, None
        if future is not None and not future.done():
            future.set_result(None)

    def request_ended(self) -> asyncio.Future[None]:
        """Return a future that completes when the next request ends."""
        if self._request_ended is None:
            self._request_ended = asyncio.get_running_loop().create_future()
        return self._request_ended

    # -- Control -----------------------------------------------------------------------------------------

    async def reset_prefix_cache(self) -> None:
        """Clear the prefix caches of all replicas."""
        await self._replicas.reset_prefix_caches()

    async def load_adapter(self, name: str, path: str) -> None:
        """Raise `UnsupportedFeatureError`: replicas that start later would not have the adapter."""
        raise _unsupported_error(
            "loading adapters at run time", "add them to --lora and deploy the application again"
        )

    async def unload_adapter(self, name: str) -> None:
        """Raise `UnsupportedFeatureError`: replicas that start later would have the adapter."""
        raise _unsupported_error(
            "unloading adapters at run time", "remove them from --lora and deploy the application again"
        )

    async def sleep(self, level: SleepLevel, grace: float) -> None:
        """Raise `UnsupportedFeatureError`: Ray Serve starts and ends replicas."""
        raise _unsupported_error("sleep", "delete the application and deploy the application again later")

    async def wake_up(self) -> None:
        """Raise `UnsupportedFeatureError`: replicas do not sleep."""
        raise _unsupported_error("wake_up", "deploy the application again")

    async def reload(self, grace: float) -> None:
        """Raise `UnsupportedFeatureError`: deploying the application again replaces its replicas."""
        raise _unsupported_error("reload", "deploy the application again")

    async def start_profile(self) -> None:
        """Raise `UnsupportedFeatureError`: the replicas run on several nodes."""
        raise _unsupported_error("a profile", "use Ray's profiling, or start a server without --ray")

    async def stop_profile(self) -> None:
        """Raise `UnsupportedFeatureError`: the replicas run on several nodes."""
        raise _unsupported_error("a profile", "use Ray's profiling, or start a server without --ray")

    def watch_cache(self, listener: CacheListener) -> None:
        """Raise `UnsupportedFeatureError`: replicas report digests of cached blocks, but not their tokens."""
        raise _unsupported_error("cache events", "start a server without --ray")

    # -- Start and stop ----------------------------------------------------------------------------------

    def launch(self) -> None:
        """Do nothing: Ray Serve starts the replicas."""

    async def start(self) -> None:
        """Wait until at least one replica is ready."""
        while not self._reports:
            await self._poll()
        self._info = next(iter(self._reports.values())).info
        self.adapters = dict(self._info.adapters)
        self.state = "ready"
        self._polling_task = asyncio.create_task(self._keep_polling())

    async def stop(self, grace: float) -> None:
        """Refuse new requests, wait up to ``grace`` seconds for running ones, and fail those that remain."""
        self.state = "stopping"
        if self._polling_task is not None:
            self._polling_task.cancel()
        if self._tasks:
            await asyncio.wait([*self._tasks.values()], timeout=grace)
        for generation in list(self._generations.values()):
            self._tasks[generation.request_id].cancel()
            self._fail(generation, UnavailableError("the server is shutting down"))
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self.state = "stopped"

    async def _keep_polling(self) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            await self._poll()

    async def _poll(self) -> None:
        """Read the reports of all replicas.

        A replica that does not answer is not chosen for requests until it answers again.
        """
        new_reports: dict[str, ReplicaReport] = {}
        with suppress(ReplicaLostError):
            for data in await self._replicas.reports(self._choice.positions):
                report = self._decode_report(data)
                new_reports[report.name] = report
        for name, report in self._reports.items():
            if name not in new_reports:
                self._missing_reports[name] = report
        for name in new_reports:  # a replica can report again after it has stopped reporting
            self._missing_reports.pop(name, None)
        while len(self._missing_reports) > _MAX_MISSING_REPORTS:
            report = self._missing_reports.pop(next(iter(self._missing_reports)))
            _add_totals(self._ended_stats, report.stats)
            self._num_ended_restarts += report.num_restarts
        self._choice.update(new_reports)
        self._reports = new_reports


def _continued_request(frames: Sequence[bytes], tokens: Sequence[int]) -> list[bytes] | None:
    """Return the frames of a request that continues after its generated tokens.

    Returns None if the request cannot be continued (`RayEngine`).
    """
    command = command_decoder()(frames)
    assert isinstance(command, Submit)
    context = command.context
    if type(context) is not TextContext or context.grammar is not None or context.log_probabilities:
        return None
    for token in tokens:
        context.update(token)
    context.outstanding_response()  # the caller has already received these tokens
    context.reset()
    context.set_token_indices(active_idx=context.end_idx)
    return [bytes(frame) for frame in command_encoder()(Submit(context))]


def _add_totals(total: WorkerStats, stats: WorkerStats) -> None:
    """Add the totals of ``stats`` to ``total``. Current values are not added."""
    for name in WorkerStats.__struct_fields__:
        if name not in _GAUGES:
            setattr(total, name, getattr(total, name) + getattr(stats, name))


def _unsupported_error(feature: str, alternative: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(f"{feature} on Ray", alternative)
