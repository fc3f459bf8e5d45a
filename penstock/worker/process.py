"""The model loop: takes requests from a socket, steps the scheduler, and sends back what each step brought.

It runs in the main thread of a process of its own (`main`), or in a thread of a test (`run_worker`). Nothing
here polls: with nothing to run the loop sleeps in the socket until a command comes.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import zmq

from penstock.errors import PenstockError, RequestFailedError, UnavailableError, UnsupportedFeatureError
from penstock.host import heartbeat, private_memory
from penstock.host.garbage_collection import gc_disabled
from penstock.pipelines.core import RequestContext
from penstock.pipelines.core.interfaces import PipelineOutput
from penstock.scheduler.scheduler import Scheduler
from penstock.worker.messages import (
    Admission,
    CallResult,
    Cancel,
    Command,
    ErrorRecord,
    Failure,
    LoadAdapter,
    Ping,
    Pong,
    RequestResult,
    Started,
    StartFailed,
    StepResults,
    Stop,
    Submit,
    UnloadAdapter,
    WorkerInfo,
    WorkerMessage,
    WorkerStats,
    command_decoder,
    report_encoder,
)
from penstock.worker.outputs import result_of

_LOG = logging.getLogger("penstock.worker")

_RETRY = 4
"""Milliseconds until contexts that are not ready are asked again, while nothing else runs."""
OUT_OF_MEMORY = 12
"""The exit status of a worker that has reached its limit of private memory (the number of ``ENOMEM``)."""
_LINGER = 2000
"""Milliseconds that the last messages have to leave a worker which ends."""


@dataclass(frozen=True, kw_only=True)
class WorkerRuntime:
    """What a worker runs: made by the factory in the worker's own process."""

    scheduler: Scheduler[Any, Any]
    info: WorkerInfo
    load_adapter: Callable[[str, str], None] | None = None
    """Loads the LoRA adapter at a path (second) under a name (first); None if adapters are not enabled."""
    unload_adapter: Callable[[str], None] | None = None
    """Removes a LoRA adapter."""
    num_steps: Callable[[], int] = lambda: 1
    """Most tokens that a request gains in the next step of the scheduler."""
    add_counts: Callable[[WorkerStats], None] = lambda stats: None
    """Writes the counts that the pipeline keeps into the statistics."""
    pack_pending: Callable[[], bool] = lambda: False
    """Packs some of the weights that are not packed yet; False when all are packed."""


@dataclass(frozen=True)
class Endpoint:
    """Where worker and serving side meet: a folder that is private to them, with a socket each way."""

    folder: str
    number: int = 0
    """A worker that is started again gets sockets of its own, so that nothing late is taken for its words."""

    @property
    def commands(self) -> str:
        """Bound by the worker."""
        return f"ipc://{self.folder}/commands-{self.number}"

    @property
    def reports(self) -> str:
        """Bound by the serving side."""
        return f"ipc://{self.folder}/reports-{self.number}"

    @property
    def progress(self) -> str:
        """The file in which the worker counts its progress."""
        return f"{self.folder}/progress-{self.number}"


def run_worker(factory: Callable[[], WorkerRuntime], endpoint: Endpoint) -> None:
    """Makes the work, says so, and does it until a `Stop` comes.

    Args:
        factory: loads the model. An error it raises is reported, and the worker ends.
        endpoint: where the serving side listens already.

    Raises:
        Exception: what the scheduler could not pin on single requests; then a new worker is needed.
    """
    with zmq.Context() as context, context.socket(zmq.PULL) as commands, context.socket(zmq.PUSH) as reports:
        commands.rcvhwm = 0  # as many as the serving side lets out
        commands.bind(endpoint.commands)
        reports.linger = _LINGER
        reports.connect(endpoint.reports)
        encode = report_encoder()
        try:
            work = factory()
        except Exception as error:
            _LOG.debug("the start failed", exc_info=True)
            reports.send(encode(StartFailed(_start_failure(error))))
            return
        reports.send(encode(Started(work.info)))
        _Loop(work, commands, lambda report: reports.send(encode(report))).run()


class _Loop:
    """Commands in, steps, reports out."""

    def __init__(
        self, work: WorkerRuntime, commands: zmq.Socket[bytes], send: Callable[[WorkerMessage], None]
    ) -> None:
        self._work = work
        self._scheduler = work.scheduler
        self._commands = commands
        self._decode = command_decoder()
        self._send = send
        self._contexts: dict[str, RequestContext] = {}  # all that have not ended
        self._lengths: dict[str, int] = {}
        self._cancelled: list[str] = []
        self._refused: list[Failure] = []
        self._stats = WorkerStats()
        self._is_stopping = False

    def run(self) -> None:
        wait = True
        while not self._is_stopping:
            self._take_commands(wait)
            wait = not self._step()

    # -- Commands ----------------------------------------------------------------------------------------

    def _take_commands(self, wait: bool) -> None:
        """All that has come; with ``wait`` sleeps until something has, or until it is time to try again."""
        if wait:
            has_work = self._scheduler.has_work
            while not self._commands.poll(0) and self._work.pack_pending() and not has_work:
                heartbeat.beat()
            self._commands.poll(_RETRY if has_work else None)
        while True:
            try:
                frame = self._commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(self._decode(frame))

    def _take(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command.context)
            case Cancel():
                if self._forget(command.request_id):  # else it has ended by itself, and that was reported
                    self._scheduler.cancel(command.request_id)
                    self._cancelled.append(command.request_id)
            case LoadAdapter() | UnloadAdapter():
                self._send(CallResult(command.call_id, self._change_adapters(command)))
            case Ping():
                private_memory.follow_mapped_files()
                self._send(Pong(self._current_stats()))
            case Stop():
                self._is_stopping = True

    def _submit(self, context: RequestContext) -> None:
        try:
            self._scheduler.submit(context)
        except Exception as error:
            self._refused.append(self._fail(context.request_id, error))
        else:
            self._contexts[context.request_id] = context
            self._lengths[context.request_id] = context.current_length

    def _change_adapters(self, command: LoadAdapter | UnloadAdapter) -> ErrorRecord | None:
        try:
            load, unload = self._work.load_adapter, self._work.unload_adapter
            if load is None or unload is None:
                raise UnsupportedFeatureError("LoRA adapters", "this server was started without them")
            if isinstance(command, LoadAdapter):
                load(command.name, command.path)
            else:
                unload(command.name)
        except Exception as error:
            if not isinstance(error, PenstockError):
                _LOG.exception("adapter %s", command.name)
            return ErrorRecord.of(error)
        return None

    # -- Steps -------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """One step, and its report. False where there was nothing to run."""
        outputs: dict[str, PipelineOutput] = {}
        has_run = False
        if self._scheduler.has_work:
            heartbeat.beat()
            begin = time.perf_counter()
            try:
                outputs = self._scheduler.step(self._work.num_steps())
            except Exception as error:
                self._tell_of_memory(error)
                raise
            has_run = self._scheduler.last_batch[0] > 0
            if has_run:
                self._count_step(time.perf_counter() - begin)
        admissions = [self._admit(context) for context in self._scheduler.admitted]
        results = [result for item in outputs.items() if (result := self._result(*item)) is not None]
        failures = self._take_failures()
        cancelled, self._cancelled = self._cancelled, []
        if has_run or failures or cancelled:
            self._send(StepResults(self._current_stats(), admissions, results, failures, cancelled))
        return has_run

    def _admit(self, context: RequestContext) -> Admission:
        stats, num_tokens = self._stats, len(context.prompt_tokens)
        stats.num_prompt_tokens += num_tokens
        if not context.log_probabilities_echo:  # whose every row has to be computed
            stats.num_prefix_query_tokens += num_tokens
            stats.num_prefix_hit_tokens += context.num_cached_tokens
        return Admission(context.request_id, context.num_cached_tokens)

    def _result(self, request_id: str, output: PipelineOutput) -> RequestResult | None:
        """Return what a step computed for a request; None if that is nothing yet, as after a prompt chunk."""
        context = self._contexts[request_id]
        result = result_of(context, output)
        if result is not None:
            self._stats.num_generated_tokens += context.current_length - self._lengths[request_id]
            self._lengths[request_id] = context.current_length
        if output.is_done:
            self._forget(request_id)
        return result

    def _take_failures(self) -> list[Failure]:
        failures, self._refused = self._refused, []
        while self._scheduler.failures:
            request_id, error = self._scheduler.failures.popitem()
            self._forget(request_id)
            failures.append(self._fail(request_id, error))
        return failures

    def _tell_of_memory(self, error: Exception, *request_ids: str) -> None:
        """Ends the requests that run, and those named, if an error says that private memory is used up."""
        if not private_memory.is_exceeded(error):
            return
        reason = ErrorRecord.of(private_memory.error_of_requests())
        running = [name for name, context in self._contexts.items() if context.is_assigned_to_cache]
        failures = [Failure(name, reason) for name in {*running, *request_ids}]
        self._send(StepResults(self._current_stats(), failures=failures))

    def _fail(self, request_id: str, error: Exception) -> Failure:
        """The end of a request, which goes to the log if it is our fault.

        Raises:
            Exception: it is the error, and says that the limit of private memory is reached.
        """
        if private_memory.is_exceeded(error):
            self._tell_of_memory(error, request_id)
            raise error
        if isinstance(error, RequestFailedError) or not isinstance(error, PenstockError):
            _LOG.error("request %s failed", request_id, exc_info=error.__cause__ or error)
        return Failure(request_id, ErrorRecord.of(error))

    def _forget(self, request_id: str) -> bool:
        self._lengths.pop(request_id, None)
        return self._contexts.pop(request_id, None) is not None

    # -- Counts ------------------------------------------------------------------------------------------

    def _count_step(self, seconds: float) -> None:
        stats = self._stats
        stats.num_steps += 1
        stats.step_seconds += seconds
        stats.last_batch_size, stats.last_batch_tokens = self._scheduler.last_batch

    def _current_stats(self) -> WorkerStats:
        stats, scheduler = self._stats, self._scheduler
        stats.num_running, stats.num_waiting = scheduler.num_running, scheduler.num_waiting
        stats.num_preemptions = scheduler.num_preemptions
        stats.num_blocks = scheduler.kv.num_blocks
        stats.num_used_blocks = scheduler.kv.num_blocks - scheduler.kv.num_free_blocks
        stats.num_cached_blocks = scheduler.kv.num_cached_blocks
        self._work.add_counts(stats)
        return stats


def _start_failure(error: Exception) -> ErrorRecord:
    """Whoever starts a server is told all."""
    if private_memory.is_exceeded(error):
        return ErrorRecord.of(private_memory.error_of_load())
    if isinstance(error, PenstockError):
        return ErrorRecord.of(error)
    return ErrorRecord.of(UnavailableError(f"the worker could not start: {type(error).__name__}: {error}"))


# -- In a process of its own -----------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerLaunch:
    """What the process of a worker is given on its standard input, which then stays open."""

    factory: Callable[[], WorkerRuntime]
    endpoint: Endpoint
    launched_at: float
    """``time.time()`` when it was started."""
    memory_limit: int | None = None
    """Bytes of private memory that it may take."""


def main() -> None:
    """Runs a worker in this process, which belongs to it, until it is told to stop or its parent is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # both go to whole groups of processes; the parent decides
    launch: WorkerLaunch = pickle.load(sys.stdin.buffer)
    begun = time.time()
    heartbeat.publish(launch.endpoint.progress)
    threading.Thread(target=_exit_with_parent, args=(launch.endpoint.folder,), daemon=True).start()

    def load() -> WorkerRuntime:
        if launch.memory_limit is not None:
            private_memory.bound(launch.memory_limit)
        with gc_disabled():
            work = launch.factory()
        gc.collect()
        gc.freeze()  # what was loaded stays: no collection looks at it again
        startup = [("process", begun - launch.launched_at), *work.info.startup]
        return replace(work, info=msgspec.structs.replace(work.info, startup=startup))

    try:
        run_worker(load, launch.endpoint)
        status = 0
    except BaseException as error:
        if private_memory.is_exceeded(error):
            reason = f"{type(error).__name__}: {error}"
            _LOG.critical("the worker has reached its limit of private memory and ends (%s)", reason)
            status = OUT_OF_MEMORY
        else:
            _LOG.critical("the worker gives up", exc_info=True)
            status = 1
    logging.shutdown()
    os._exit(status)  # whatever threads libraries have: nobody waits for them


def _exit_with_parent(folder: str) -> None:
    """Ends this process with its parent, which holds the other end of standard input and says nothing."""
    os.read(0, 1)  # not through sys.stdin, whose lock would be held for ever
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
