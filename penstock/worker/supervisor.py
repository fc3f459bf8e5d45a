"""Supervises one worker: start, liveness, restart and shutdown.

    starting --> ready --> restarting --> ready ...     a worker that ends unexpectedly is restarted
        |          |           |
        +----------+-----------+--> stopping --> stopped

The state changes directly to ``stopped`` if the first start fails, and after `MAX_FAILED_STARTS` consecutive
failed starts. While `WorkerSupervisor.is_asleep` is set, ``asleep`` replaces ``ready`` and ``stopped``.

All code here except `WorkerSupervisor.launch` runs on the event loop, and blocks the loop only while it
launches or ends a worker.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import count

import zmq

from penstock.errors import PenstockError, UnavailableError
from penstock.worker.connection import WorkerConnection
from penstock.worker.engine_client import EngineState
from penstock.worker.liveness import MAX_LOAD_PAUSE, Liveness
from penstock.worker.messages import (
    Command,
    Ping,
    Pong,
    Started,
    StartFailed,
    StepResults,
    Stop,
    WorkerInfo,
    WorkerMessage,
)
from penstock.worker.process import Endpoint, WorkerRuntime

_LOG = logging.getLogger("penstock.worker")

_WORKER_ENDED = "the worker process ended unexpectedly{} and is being restarted: try again"

MAX_FAILED_STARTS = 5
"""Number of consecutive failed starts after which the worker is no longer restarted."""
RESTART_DELAY = 0.25
"""The next start follows the n-th consecutive failed start after ``2**n`` times this many seconds."""
PING_INTERVAL = 2.0
"""Seconds between two liveness checks of a worker; fewer if the hang limit is below 4 times this value."""
DRAIN_TIMEOUT = 0.05
"""Seconds to wait for the last messages of a worker that has ended."""
SHUTDOWN_TIMEOUT = 5.0
"""Seconds to wait for a worker to exit after `Stop`, before it is killed."""


class WorkerSupervisor:
    """Starts one worker, restarts it if it ends or hangs, and transfers commands and reports.

    Args:
        factory: loads the model in the worker's process; picklable, unless ``in_thread``.
        on_report: called with each report from the worker, except reports about its start.
        on_start: awaited after the model is loaded and before the worker is ready.
        on_end: called with an error message each time a started worker ends unexpectedly or a restart fails.
        in_thread: whether the worker runs in a thread of this process, for tests.
        hang_limit: seconds without a report and without progress after which the worker is killed and
            restarted. A worker process also counts progress within a step, so a long step does not reach the
            limit. A worker in a thread has no progress counter, so it needs a large limit.
        memory_limit: limit of the worker's private memory, in bytes; None for no limit.
    """

    def __init__(
        self,
        factory: Callable[[], WorkerRuntime],
        *,
        on_report: Callable[[WorkerMessage], None],
        on_start: Callable[[], Coroutine[None, None, None]],
        on_end: Callable[[str], None],
        in_thread: bool = False,
        hang_limit: float = 20.0,
        memory_limit: int | None = None,
    ) -> None:
        self._factory = factory
        self._on_report = on_report
        self._on_start = on_start
        self._on_end = on_end
        self._runs_in_thread = in_thread
        self._hang_limit = hang_limit
        self._memory_limit = memory_limit
        self._endpoint_numbers = count()
        self._state: EngineState = "stopped"
        self._was_ready = False  # whether the worker was ready when the shutdown began
        self.is_asleep = False
        """Whether the worker is asleep, so that requests are rejected. Set by `WorkerClient`."""
        self._connection: WorkerConnection | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._folder = ""
        self._start_result: asyncio.Future[WorkerInfo | PenstockError] | None = None
        self._supervision_task: asyncio.Task[None] | None = None
        self._liveness: Liveness | None = None
        self._kill_reason = ""
        # whether the current worker has sent a Pong or StepResults since it became ready
        self._has_answered = False
        self._info: WorkerInfo | None = None
        self.failure: PenstockError | None = None
        """The error of the last start if the worker is no longer restarted; otherwise None."""
        self.num_restarts = 0
        """Number of times that the worker ended unexpectedly or a restart failed."""

    # -- State -------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """The state of the worker. Only a ``ready`` worker accepts requests."""
        return "asleep" if self.is_asleep and self._state in ("ready", "stopped") else self._state

    @property
    def is_alive(self) -> bool:
        """Whether the worker has loaded its model, and answered or made progress within the hang limit.

        A sleeping worker without a process counts as alive, unless it could not be restarted.
        """
        silence = 0.0 if self._liveness is None else self._liveness.silence
        if self.is_asleep and self._state == "stopped":
            return self.failure is None
        return self._state in ("ready", "stopping") and silence < self._hang_limit

    @property
    def is_running(self) -> bool:
        """Whether the worker has been launched and its resources have not been released since."""
        return self._context is not None

    @property
    def info(self) -> WorkerInfo:
        """The information that the newest worker reported after its start."""
        assert self._info is not None, "the worker has not started"
        return self._info

    @property
    def initial_adapters(self) -> list[tuple[str, str]]:
        """Name and path of the adapters that the worker loaded when it started; empty before the start."""
        return [] if self._info is None else self._info.adapters

    @property
    def retry_after(self) -> int:
        """The estimated duration of a start, in whole seconds from 1 to 60."""
        seconds = sum(seconds for _, seconds in self._info.startup) if self._info is not None else 1
        return min(max(1, math.ceil(seconds)), 60)

    def check_ready(self) -> None:
        """Check that the worker accepts requests.

        Raises:
            UnavailableError: the worker does not accept requests. The message contains the reason.
        """
        if self.state == "ready":
            return
        if self.state == "asleep":
            reason = "the model is asleep: send POST /wake_up, then try again"
        elif self.failure is not None:
            reason = f"the worker could not be restarted: {self.failure}"
        elif self._state == "starting":
            reason = "the model is being loaded: try again"
        elif self._state == "restarting":
            reason = _WORKER_ENDED.format("")
        else:
            reason = "the server is shutting down"
        raise UnavailableError(reason, retry_after=self.retry_after)

    def send(self, command: Command) -> None:
        """Send a command to the worker. Never blocks."""
        assert self._connection is not None
        self._connection.send(command)

    # -- Start and stop ----------------------------------------------------------------------------------

    def launch(self) -> None:
        """Launch the worker. Needs no event loop. Does nothing if it is launched already."""
        if self._connection is not None:
            return
        # The path of a Unix socket is limited to about 100 characters.
        has_short_path = len(tempfile.gettempdir()) < 60
        self._folder = tempfile.mkdtemp(prefix="penstock-", dir=None if has_short_path else "/tmp")
        self._context = zmq.Context()
        self._state = "starting"
        try:
            self._connect()
        except BaseException:
            self._clean_up()
            raise

    async def start(self) -> None:
        """Launch the worker if needed, and wait until it is ready.

        Raises:
            PenstockError: the reason why the worker could not start.
        """
        task = self._supervision_task
        assert task is None or task.done(), "the worker was started already"
        self.launch()
        first_start = asyncio.get_running_loop().create_future()
        self._supervision_task = asyncio.create_task(self._supervise(first_start))
        self._supervision_task.add_done_callback(lambda _: _fail_unfinished_start(first_start))
        try:
            await first_start
        except asyncio.CancelledError:
            if self.begin_stop():
                await self.finish_stop()
            raise

    def begin_stop(self) -> bool:
        """Stop accepting requests. Return False if the worker is not launched or is being stopped."""
        if self._context is None or self._state == "stopping":
            return False
        self._was_ready, self._state = self._state == "ready", "stopping"
        return True

    async def finish_stop(self) -> None:
        """End the worker after `begin_stop`, and remove its files."""
        if self._supervision_task is not None:
            self._supervision_task.cancel()
            await asyncio.wait({self._supervision_task})
        connection = self._connection
        if self._was_ready and connection is not None and not connection.end_event.is_set():
            connection.send(Stop())
            with suppress(TimeoutError):
                await asyncio.wait_for(connection.end_event.wait(), SHUTDOWN_TIMEOUT)
        self._clean_up()

    # -- Supervision -------------------------------------------------------------------------------------

    async def _supervise(self, first_start: asyncio.Future[None]) -> None:
        """Restart the worker until the shutdown begins, or until too many starts have failed."""
        num_failed = 0  # consecutive starts that failed, or whose worker ended before it answered
        while True:
            error = await self._start_worker()
            if error is None:
                self._state = "ready"
                if not first_start.done():
                    first_start.set_result(None)
                has_answered = await self._watch()
                error = UnavailableError("the worker ended before it answered a request or a ping")
                num_failed = 0 if has_answered else num_failed + 1
            else:
                num_failed += 1
            reason = self._disconnect()
            if not first_start.done():
                self._clean_up()
                first_start.set_exception(error)
                return
            self._on_end(_WORKER_ENDED.format(f" ({reason})" if reason else ""))
            if self._state == "stopping":
                return
            self._state = "restarting"
            self.num_restarts += 1
            if num_failed >= MAX_FAILED_STARTS:
                self.failure = error
                _LOG.critical("the worker is not restarted after %d failed starts: %s", num_failed, error)
                self._state = "stopped"
                return
            _LOG.error("the worker ended (%s) and is restarted", reason if not num_failed else error)
            await asyncio.sleep(RESTART_DELAY * 2**num_failed if num_failed else 0)

    async def _start_worker(self) -> PenstockError | None:
        """Launch a worker if needed, and wait for its start. Return the error of a failed start, or None."""
        try:
            connection = self._connection or self._connect()
        except (OSError, zmq.ZMQError) as error:
            return UnavailableError(f"the worker could not be launched: {error}")
        self._start_result = asyncio.get_running_loop().create_future()
        connection.attach(self._handle_report)
        if not await self._completes_before_end(_wait_for(self._start_result)):
            return UnavailableError(f"the worker ended while it started: {self._disconnect()}")
        result = self._start_result.result()
        if isinstance(result, PenstockError):
            return result
        self._info = result
        if not await self._completes_before_end(self._on_start()):
            return UnavailableError(f"the worker ended while it loaded adapters: {self._disconnect()}")
        return None

    async def _watch(self) -> bool:
        """Wait until the worker ends or hangs. Return whether it has sent `Pong` or `StepResults`."""
        connection, self._has_answered = self._connection, False
        assert connection is not None
        liveness = self._liveness = Liveness(connection, self._check_interval)
        while not connection.end_event.is_set():
            connection.drain()
            self._kill_reason = liveness.check(self._hang_limit)
            if self._kill_reason:
                break
            if not liveness.awaits_answer:
                liveness.expect_answer()
                connection.send(Ping())
            with suppress(TimeoutError):
                await asyncio.wait_for(connection.end_event.wait(), self._check_interval)
        await asyncio.sleep(DRAIN_TIMEOUT)
        connection.drain()
        return self._has_answered

    async def _completes_before_end(self, coroutine: Coroutine[None, None, None]) -> bool:
        """Run a coroutine until it completes, or the worker ends or hangs. Return whether it completed."""
        assert self._connection is not None
        connection = self._connection
        task, end_task = asyncio.create_task(coroutine), asyncio.create_task(connection.end_event.wait())
        hang_task = asyncio.create_task(self._wait_until_start_hangs(connection))
        try:
            await asyncio.wait({task, end_task, hang_task}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.sleep(DRAIN_TIMEOUT)
                connection.drain()
                await asyncio.sleep(0)
            return task.done()
        finally:
            for pending_task in (task, end_task, hang_task):
                pending_task.cancel()

    async def _wait_until_start_hangs(self, connection: WorkerConnection) -> None:
        """Wait until a starting worker has made no progress for too long, or is suspended."""
        liveness = Liveness(connection, self._check_interval)
        liveness.expect_answer()
        while not (reason := liveness.check(max(MAX_LOAD_PAUSE, self._hang_limit))):
            await asyncio.sleep(self._check_interval)
        self._kill_reason = reason

    def _handle_report(self, report: WorkerMessage) -> None:
        if self._liveness is not None:
            self._liveness.on_answer()
        match report:
            case Started():
                assert self._start_result is not None
                self._start_result.set_result(report.info)
            case StartFailed():
                assert self._start_result is not None
                self._start_result.set_result(report.error.error())
            case _:
                if isinstance(report, StepResults | Pong):
                    self._has_answered = True
                self._on_report(report)

    # -- Resources ---------------------------------------------------------------------------------------

    def _connect(self) -> WorkerConnection:
        assert self._context is not None
        endpoint = Endpoint(self._folder, next(self._endpoint_numbers))
        self._liveness, self._kill_reason = None, ""
        self._connection = WorkerConnection(
            self._context,
            self._factory,
            endpoint,
            in_thread=self._runs_in_thread,
            memory_limit=self._memory_limit,
        )
        return self._connection

    def _disconnect(self) -> str:
        """End the worker. Return a description of how it ended."""
        connection, self._connection = self._connection, None
        exit_status = connection.close() if connection is not None else ""
        return self._kill_reason or exit_status

    def _clean_up(self) -> None:
        """End the worker, close the sockets, and remove the folder with the endpoints."""
        self._disconnect()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
            shutil.rmtree(self._folder, ignore_errors=True)
        self._state = "stopped"

    @property
    def _check_interval(self) -> float:
        """Seconds between two liveness checks."""
        return min(PING_INTERVAL, self._hang_limit / 4)


def _fail_unfinished_start(first_start: asyncio.Future[None]) -> None:
    """Make `start` raise an error if the supervision ended before the first start was complete."""
    if not first_start.done():
        first_start.set_exception(UnavailableError("the server was stopped while it started"))


async def _wait_for(future: asyncio.Future[WorkerInfo | PenstockError]) -> None:
    await future
