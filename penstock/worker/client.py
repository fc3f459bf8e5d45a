"""The worker as the rest of the server sees it: contexts in, tokens out, and news of its health.

    starting --> ready --> restarting --> ready ...     a worker that dies is started again
        |          |           |
        +----------+-----------+--> stopping --> stopped

Everything here runs on the event loop and never blocks it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import count
from typing import Literal, TypeAlias

import zmq

from penstock.errors import InputError, OverloadedError, PenstockError, UnavailableError
from penstock.pipelines.core import TextContext
from penstock.worker.link import WorkerConnection
from penstock.worker.liveness import MAX_LOAD_PAUSE, Liveness
from penstock.worker.messages import (
    CallResult,
    Cancel,
    LoadAdapter,
    Ping,
    Pong,
    Started,
    StartFailed,
    StepResults,
    Stop,
    Submit,
    UnloadAdapter,
    WorkerInfo,
    WorkerMessage,
    WorkerStats,
)
from penstock.worker.process import Endpoint, WorkerRuntime
from penstock.worker.results import Generation, RequestDelta

__all__ = ["Generation", "RequestDelta", "WorkerClient"]

State: TypeAlias = Literal["starting", "ready", "restarting", "stopping", "stopped"]

_LOG = logging.getLogger("penstock.worker")

_HAS_DIED = "the worker that runs the model has died{} and is being started again: try again"

_MAX_STARTS = 5
"""Starts in a row that fail until the worker stays down."""
_BACK_OFF = 0.25
"""Seconds before the start after one that failed, doubled with each more of them."""
_PING = 2.0
"""Seconds between two looks at a worker that says nothing by itself."""
_LOOK = 0.02
"""Seconds between two looks at the requests that a server which stops waits for."""
DRAIN_TIMEOUT = 0.05
"""Seconds in which what a worker said before it ended arrives."""
SHUTDOWN_TIMEOUT = 5.0
"""Seconds that a worker has to end by itself when it is told to."""


class WorkerClient:
    """Starts the worker, sends it requests, gives their results out, and starts it again where it dies.

    Args:
        factory: makes the worker's work in the worker's process; picklable, unless ``in_thread``.
        in_thread: runs the worker in a thread of this process, for tests.
        max_queue_size: requests that may wait for a place in the batch; by default 4 batches, at least 64.
            Clients that have less than a batch of their own outstanding may exceed it, by one batch together.
        hang_limit: seconds without an answer and without progress after which the worker is ended and
            started again. A long step makes progress; in a thread it does not: make the limit generous there.
        memory_limit: bytes of private memory that the worker's process may take.
    """

    def __init__(
        self,
        factory: Callable[[], WorkerRuntime],
        *,
        in_thread: bool = False,
        max_queue_size: int | None = None,
        hang_limit: float = 20.0,
        memory_limit: int | None = None,
    ) -> None:
        self._factory = factory
        self._in_thread = in_thread
        self._max_queue_size = max_queue_size
        self._hang_limit = hang_limit
        self._memory_limit = memory_limit
        self._numbers = count()
        self._calls: dict[int, asyncio.Future[PenstockError | None]] = {}
        self._generations: dict[str, Generation] = {}
        self._cancelled: set[str] = set()  # the worker has not said yet that they ended
        self._clients: dict[str, str] = {}  # of each request that is outstanding
        self._adapters: dict[str, str | None] = {}  # changed while serving: name -> path, None: unloaded
        self._state: State = "stopped"
        self._link: WorkerConnection | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._folder = ""
        self._start: asyncio.Future[WorkerInfo | PenstockError] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._liveness: Liveness | None = None  # of this worker
        self._why_ended = ""  # by us
        self._has_answered = False  # this worker, since it was ready
        self._info: WorkerInfo | None = None
        self.stats = WorkerStats()
        """The newest that the worker has sent."""
        self.failure: PenstockError | None = None
        """Why the worker could not be started again and stays down, if that is so."""
        self.num_restarts = 0
        """How often a worker died."""
        self.num_late_results = 0
        """Results that came for requests which had ended here already."""

    # -- How it is ---------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Requests are taken while it is ``ready``."""
        return self._state

    @property
    def is_alive(self) -> bool:
        """Whether the worker has its model loaded and answers, or computes no longer than a step may."""
        return self._state in ("ready", "stopping") and self._silence() < self._hang_limit

    @property
    def info(self) -> WorkerInfo:
        """What the last worker said when it had started; there is none before the first has."""
        assert self._info is not None, "the worker has not started"
        return self._info

    @property
    def adapters(self) -> dict[str, str]:
        """The LoRA adapters that are loaded, name -> path."""
        changed = dict(self.info.adapters) | self._adapters
        return {name: path for name, path in changed.items() if path is not None}

    @property
    def num_outstanding(self) -> int:
        """Requests that the worker has and has not ended."""
        return len(self._generations) + len(self._cancelled)

    @property
    def max_outstanding(self) -> int:
        """As many may be, running and waiting together."""
        size = self.info.max_batch_size
        return size + (max(64, 4 * size) if self._max_queue_size is None else self._max_queue_size)

    # -- Requests ----------------------------------------------------------------------------------------

    def submit(self, context: TextContext) -> Generation:
        """Sends a request to the worker. Never blocks.

        Raises:
            UnavailableError: there is no worker now.
            OverloadedError: as many requests as may wait do.
            InputError: its id is in use.
        """
        link = self._ready_link()
        if not self._has_room(context.client_id):
            raise OverloadedError(
                f"{self.num_outstanding} requests are being served or wait, and no more are let in: try again"
            )
        request_id = context.request_id
        if request_id in self._generations or request_id in self._cancelled:
            raise InputError(f"request {request_id} is here already: give each request its own id")
        link.send(Submit(context))
        self._clients[request_id] = context.client_id
        generation = self._generations[request_id] = Generation(request_id, self._cancel)
        return generation

    async def load_adapter(self, name: str, path: str) -> None:
        """Loads a LoRA adapter; it is loaded again whenever the worker is.

        Raises:
            PenstockError: it cannot be loaded, or there is no worker now.
        """
        await self._call(LoadAdapter(next(self._numbers), name, path))
        self._adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        """Forgets a LoRA adapter.

        Raises:
            PenstockError: it is unknown or in use, or there is no worker now.
        """
        await self._call(UnloadAdapter(next(self._numbers), name))
        self._adapters[name] = None

    # -- Its life ----------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Lets the worker begin to start, before there is an event loop. A no-op where it has."""
        if self._link is not None:
            return
        # The path of a socket may have some hundred characters.
        roomy = len(tempfile.gettempdir()) < 60
        self._folder = tempfile.mkdtemp(prefix="penstock-", dir=None if roomy else "/tmp")  # for us alone
        self._context = zmq.Context()
        self._state = "starting"
        try:
            self._open_link()
        except BaseException:
            self._shut()
            raise

    async def start(self) -> None:
        """Returns once requests can be served.

        Raises:
            PenstockError: what the start ended with; then there is no worker.
        """
        assert self._supervisor is None, "the worker was started already"
        self.launch()
        first = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(first))
        self._supervisor.add_done_callback(lambda _: _end_of_start(first))
        try:
            await first
        except asyncio.CancelledError:
            await self.stop(0)
            raise

    async def stop(self, grace: float) -> None:
        """Takes no more requests, waits up to ``grace`` seconds for those there are, and ends the worker."""
        if self._context is None or self._state == "stopping":
            return
        was_ready, self._state = self._state == "ready", "stopping"
        deadline = self._now() + grace
        link = self._link
        while was_ready and self.num_outstanding and self._now() < deadline:
            await asyncio.sleep(_LOOK)
        self._end_all("the server is shutting down")
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        if was_ready and link is not None and not link.ended.is_set():
            link.send(Stop())
            with suppress(TimeoutError):
                await asyncio.wait_for(link.ended.wait(), SHUTDOWN_TIMEOUT)
        self._shut()

    async def _supervise(self, first: asyncio.Future[None]) -> None:
        """Sees the worker through its lives."""
        num_failed = 0  # starts in a row
        while True:
            error = await self._come_up()
            if error is None:
                self._state = "ready"
                if not first.done():
                    first.set_result(None)
                has_answered = await self._watch()
                error = UnavailableError("it ended before it had answered once")
                num_failed = 0 if has_answered else num_failed + 1
            else:
                num_failed += 1
            how = self._close_link()
            if not first.done():
                self._shut()
                first.set_exception(error)
                return
            self._end_all(_HAS_DIED.format(f" ({how})" if how else ""))
            self.stats = WorkerStats()
            if self._state == "stopping":
                return
            self._state = "restarting"
            self.num_restarts += 1
            if num_failed >= _MAX_STARTS:
                self.failure = error
                _LOG.critical("the worker stays down after %d failed starts: %s", num_failed, error)
                self._state = "stopped"
                return
            _LOG.error("the worker has ended (%s) and is started again", how if not num_failed else error)
            await asyncio.sleep(_BACK_OFF * 2**num_failed if num_failed else 0)

    async def _come_up(self) -> PenstockError | None:
        """Waits until a worker has started; its error if it has not."""
        try:
            link = self._link or self._open_link()
        except (OSError, zmq.ZMQError) as error:
            return UnavailableError(f"the worker could not be launched: {error}")
        self._start = asyncio.get_running_loop().create_future()
        link.attach(self._on_report)
        if not await self._unless_it_ends(_result_of(self._start)):
            return UnavailableError(f"the worker ended while it started: {self._close_link()}")
        outcome = self._start.result()
        if isinstance(outcome, PenstockError):
            return outcome
        self._info = outcome
        if not await self._unless_it_ends(self._restore_adapters()):
            return UnavailableError(f"the worker ended while it loaded adapters: {self._close_link()}")
        return None

    async def _watch(self) -> bool:
        """Returns when the worker has ended, or says nothing for too long: whether it has ever answered."""
        link, self._has_answered = self._link, False
        assert link is not None
        liveness = self._liveness = Liveness(link, self._interval)
        while not link.ended.is_set():
            link.drain()
            self._why_ended = liveness.look(self._hang_limit)
            if self._why_ended:
                break
            if not liveness.is_asked:
                liveness.ask()
                link.send(Ping())
            with suppress(TimeoutError):
                await asyncio.wait_for(link.ended.wait(), self._interval)
        await asyncio.sleep(DRAIN_TIMEOUT)
        link.drain()
        return self._has_answered

    async def _restore_adapters(self) -> None:
        """Brings a new worker to where the last one was."""
        assert self._link is not None
        for name, path in list(self._adapters.items()):
            number = next(self._numbers)
            is_loaded = any(name == loaded for loaded, _ in self.info.adapters)
            try:
                if path is not None:
                    await self._ask(self._link, LoadAdapter(number, name, path))
                elif is_loaded:
                    await self._ask(self._link, UnloadAdapter(number, name))
            except PenstockError as error:
                _LOG.error("adapter %s could not be restored: %s", name, error)
                self._adapters[name] = None

    async def _unless_it_ends(self, what: Coroutine[None, None, None]) -> bool:
        """Whether something comes to its end before the worker does, and before the worker hangs."""
        assert self._link is not None
        link = self._link
        task, ended = asyncio.create_task(what), asyncio.create_task(link.ended.wait())
        hangs = asyncio.create_task(self._until_it_hangs(link))
        try:
            await asyncio.wait({task, ended, hangs}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.sleep(DRAIN_TIMEOUT)
                link.drain()
                await asyncio.sleep(0)
            return task.done()
        finally:
            for one in (task, ended, hangs):
                one.cancel()

    async def _until_it_hangs(self, link: WorkerConnection) -> None:
        """Returns when a worker that starts makes no progress any more, or is suspended."""
        liveness = Liveness(link, self._interval)
        liveness.ask()
        while not (why := liveness.look(max(MAX_LOAD_PAUSE, self._hang_limit))):
            await asyncio.sleep(self._interval)
        self._why_ended = why

    # -- What it says ------------------------------------------------------------------------------------

    def _on_report(self, report: WorkerMessage) -> None:
        if self._liveness is not None:
            self._liveness.hear()
        match report:
            case StepResults():
                self._has_answered = True
                self.stats = report.stats
                self._dispatch(report)
            case Pong():
                self._has_answered = True
                self.stats = report.stats
            case CallResult():
                answer = self._calls.pop(report.call_id, None)
                if answer is not None and not answer.done():
                    answer.set_result(None if report.error is None else report.error.error())
            case Started():
                assert self._start is not None
                self._start.set_result(report.info)
            case StartFailed():
                assert self._start is not None
                self._start.set_result(report.error.error())

    def _dispatch(self, report: StepResults) -> None:
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
        self._clients.pop(request_id, None)

    def _has_room(self, client_id: str) -> bool:
        """Whether a client may have another request. One client that fills the queue keeps no other out."""
        if self.num_outstanding < self.max_outstanding:
            return True
        batch = self.info.max_batch_size
        own = sum(one == client_id for one in self._clients.values())
        return own < batch and self.num_outstanding < self.max_outstanding + batch

    # -- What it is told ---------------------------------------------------------------------------------

    def _cancel(self, request_id: str) -> None:
        """Called by a generation that has not ended."""
        assert self._link is not None
        del self._generations[request_id]
        self._cancelled.add(request_id)
        self._link.send(Cancel(request_id))

    async def _call(self, command: LoadAdapter | UnloadAdapter) -> None:
        await self._ask(self._ready_link(), command)

    async def _ask(self, link: WorkerConnection, command: LoadAdapter | UnloadAdapter) -> None:
        answer: asyncio.Future[PenstockError | None] = asyncio.get_running_loop().create_future()
        self._calls[command.call_id] = answer
        link.send(command)
        try:
            error = await answer
        finally:
            self._calls.pop(command.call_id, None)
        if error is not None:
            raise error

    def _ready_link(self) -> WorkerConnection:
        if self._state != "ready":
            raise UnavailableError(self._why_not_ready(), retry_after=self._retry_after())
        assert self._link is not None
        return self._link

    def _why_not_ready(self) -> str:
        if self.failure is not None:
            return f"the model could not be started again: {self.failure}"
        return {
            "starting": "the model is being loaded: try again",
            "restarting": _HAS_DIED.format(""),
        }.get(self._state, "the server is shutting down")

    def _retry_after(self) -> int:
        """Whole seconds: about what a start takes."""
        seconds = sum(seconds for _, seconds in self._info.startup) if self._info is not None else 1
        return min(max(1, math.ceil(seconds)), 60)

    def _end_all(self, why: str) -> None:
        generations, self._generations = self._generations, {}
        self._cancelled.clear()
        self._clients.clear()
        for generation in generations.values():
            generation.fail(UnavailableError(why, retry_after=self._retry_after()))
        for answer in self._calls.values():
            if not answer.done():
                answer.set_result(UnavailableError(why, retry_after=self._retry_after()))

    # -- Means -------------------------------------------------------------------------------------------

    def _open_link(self) -> WorkerConnection:
        assert self._context is not None
        endpoint = Endpoint(self._folder, next(self._numbers))
        self._liveness, self._why_ended = None, ""
        self._link = WorkerConnection(
            self._context,
            self._factory,
            endpoint,
            in_thread=self._in_thread,
            memory_limit=self._memory_limit,
        )
        return self._link

    def _close_link(self) -> str:
        """Ends the worker, and says how it ended."""
        link, self._link = self._link, None
        how = link.close() if link is not None else ""
        return self._why_ended or how

    def _shut(self) -> None:
        """Leaves nothing behind."""
        self._close_link()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
            shutil.rmtree(self._folder, ignore_errors=True)
        self._state = "stopped"

    def _silence(self) -> float:
        """Seconds for which the worker has shown no sign of life."""
        return 0.0 if self._liveness is None else self._liveness.silence

    @property
    def _interval(self) -> float:
        """Seconds between two looks at the worker."""
        return min(_PING, self._hang_limit / 4)

    def _now(self) -> float:
        return time.monotonic()


def _end_of_start(first: asyncio.Future[None]) -> None:
    """Whoever waits for the first start does not wait for ever."""
    if not first.done():
        first.set_exception(UnavailableError("the server was stopped while it started"))


async def _result_of(future: asyncio.Future[WorkerInfo | PenstockError]) -> None:
    await future
