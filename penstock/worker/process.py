"""The loop of the worker: receives commands, calls the scheduler, and sends the results of each step.

The loop runs in the main thread of the worker process (`penstock.worker.main`), or in a thread for tests. A
worker without requests does not poll. It blocks on the socket until a command arrives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import zmq

from penstock.errors import (
    InputError,
    PenstockError,
    RequestFailedError,
    UnavailableError,
    UnsupportedFeatureError,
)
from penstock.host import heartbeat, private_memory
from penstock.host.profiler import StepProfiler
from penstock.pipelines.core import RequestContext
from penstock.pipelines.core.interfaces import PipelineOutput
from penstock.scheduler import AnyScheduler
from penstock.worker.messages import (
    Admission,
    CallResult,
    Cancel,
    Command,
    Control,
    ControlAction,
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
    WatchCache,
    WorkerInfo,
    WorkerMessage,
    WorkerStats,
    command_decoder,
    report_encoder,
)
from penstock.worker.outputs import result_message

_LOG = logging.getLogger("penstock.worker")

_READY_POLL_MS = 4
"""Milliseconds between two checks whether waiting contexts are ready, if no context runs."""
_LINGER_MS = 2000
"""Milliseconds that the worker waits for the delivery of its last messages when it ends."""


@dataclass(frozen=True, kw_only=True)
class WorkerRuntime:
    """The scheduler and the functions that a worker calls. The factory creates it in the worker process."""

    scheduler: AnyScheduler
    info: WorkerInfo
    load_adapter: Callable[[str, str], None] | None = None
    """Loads a LoRA adapter, given its name and its path; None if adapters are not enabled."""
    unload_adapter: Callable[[str], None] | None = None
    """Unloads a LoRA adapter, given its name; None if adapters are not enabled."""
    num_steps: Callable[[], int] = lambda: 1
    """Returns the maximum number of tokens per request in the next step of the scheduler."""
    add_counts: Callable[[WorkerStats], None] = lambda stats: None
    """Writes the counters of the pipeline into the statistics."""
    discard_cache: Callable[[], None] = lambda: None
    """Returns the memory of the KV cache to the system. Called when no request runs."""
    profiler: StepProfiler | None = None
    """Records profiles of the steps; None if no folder for profiles is configured."""
    prepare_next: Callable[[], bool] = lambda: False
    """Does one part of the preparation that can wait until the worker is idle. Returns whether more may
    remain, see `TaskPipeline.prepare_next`."""
    sentinel: int | None = None
    """A file descriptor that becomes readable when a process that the model needs has ended."""
    check: Callable[[], None] | None = None
    """Raises an error if a process that the model needs has ended; see ``sentinel``."""


@dataclass(frozen=True)
class Endpoint:
    """The addresses of one worker run: two sockets and a progress file in a private folder."""

    folder: str
    run_number: int = 0
    """Number of the run. Each run has separate sockets, so that it receives no messages of earlier runs."""

    @property
    def commands(self) -> str:
        """The socket of commands, which the worker binds."""
        return f"ipc://{self.folder}/commands-{self.run_number}"

    @property
    def reports(self) -> str:
        """The socket of reports, which the server binds."""
        return f"ipc://{self.folder}/reports-{self.run_number}"

    @property
    def progress(self) -> str:
        """The file with the worker's progress counter."""
        return f"{self.folder}/progress-{self.run_number}"


def run_worker(factory: Callable[[], WorkerRuntime], endpoint: Endpoint) -> None:
    """Load the model, report the start, and serve commands until `Stop` arrives.

    Args:
        factory: loads the model. If it raises an exception, the worker reports the error and ends.
        endpoint: the addresses. The server must have bound the socket of reports.

    Raises:
        Exception: an error that does not belong to single requests, or exhausted memory. The worker must be
            restarted.
    """
    with zmq.Context() as context, context.socket(zmq.PULL) as commands, context.socket(zmq.PUSH) as reports:
        commands.rcvhwm = 0  # the engine client bounds the number of requests
        commands.bind(endpoint.commands)
        reports.linger = _LINGER_MS
        reports.connect(endpoint.reports)
        encode = report_encoder()
        try:
            runtime = factory()
        except Exception as error:
            _LOG.debug("the start failed", exc_info=True)
            reports.send(encode(StartFailed(_start_failure(error))))
            return
        reports.send(encode(Started(runtime.info)))
        _Loop(runtime, commands, lambda report: reports.send(encode(report))).run()


class _Loop:
    """Processes commands, runs steps and sends reports."""

    def __init__(
        self, runtime: WorkerRuntime, commands: zmq.Socket[bytes], send: Callable[[WorkerMessage], None]
    ) -> None:
        self._runtime = runtime
        self._scheduler = runtime.scheduler
        self._commands = commands
        self._decode = command_decoder()
        self._send = send
        self._contexts: dict[str, RequestContext] = {}  # contexts of requests that have not ended, by id
        self._lengths: dict[str, int] = {}  # request id -> length of the context at the last result
        self._cancelled: list[str] = []
        self._refused_requests: list[Failure] = []
        self._stats = WorkerStats()
        self._is_stopping = False

    def run(self) -> None:
        should_wait = True
        while not self._is_stopping:
            self._receive_commands(should_wait)
            should_wait = not self._step()

    # -- Commands ----------------------------------------------------------------------------------------

    def _receive_commands(self, should_wait: bool) -> None:
        """Process all commands that have arrived.

        With ``should_wait``, first call `WorkerRuntime.prepare_next` until a command arrives or nothing
        remains; only once if contexts wait. Then block until a command arrives or contexts must be checked.
        """
        if should_wait:
            has_work = self._scheduler.has_work
            while not self._commands.poll(0) and self._runtime.prepare_next() and not has_work:
                heartbeat.beat()
            self._wait(_READY_POLL_MS if has_work else None)
        while True:
            try:
                frames = self._commands.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(self._decode(frames))

    def _wait(self, milliseconds: int | None) -> None:
        """Block until a command arrives or the time has passed.

        Raises:
            PenstockError: a process that the model needs has ended.
        """
        if self._runtime.sentinel is None or self._runtime.check is None:
            self._commands.poll(milliseconds)
            return
        poller = zmq.Poller()
        poller.register(self._commands, zmq.POLLIN)
        poller.register(self._runtime.sentinel, zmq.POLLIN)
        poller.poll(milliseconds)
        self._runtime.check()

    def _handle(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command.context)
            case Cancel():
                if self._forget(command.request_id):  # False if the end of the request was already reported
                    self._scheduler.cancel(command.request_id)
                    self._cancelled.append(command.request_id)
            case LoadAdapter() | UnloadAdapter():
                self._send(CallResult(command.call_id, self._change_adapters(command)))
            case Control():
                self._send(CallResult(command.call_id, self._control(command.action)))
            case WatchCache():
                self._scheduler.kv.record_events()
            case Ping():
                private_memory.exempt_mapped_files()
                self._send(Pong(self._current_stats()))
            case Stop():
                self._is_stopping = True

    def _submit(self, context: RequestContext) -> None:
        try:
            self._scheduler.submit(context)
        except Exception as error:
            self._refused_requests.append(self._fail(context.request_id, error))
        else:
            self._contexts[context.request_id] = context
            self._lengths[context.request_id] = context.current_length

    def _change_adapters(self, command: LoadAdapter | UnloadAdapter) -> ErrorRecord | None:
        try:
            load, unload = self._runtime.load_adapter, self._runtime.unload_adapter
            if load is None or unload is None:
                raise UnsupportedFeatureError("LoRA adapters", "the server was started without LoRA adapters")
            if isinstance(command, LoadAdapter):
                load(command.name, command.path)
            else:
                unload(command.name)
        except Exception as error:
            if not isinstance(error, PenstockError):
                _LOG.exception("adapter %s could not be loaded or unloaded", command.name)
            return ErrorRecord.from_error(error)
        return None

    def _control(self, action: ControlAction) -> ErrorRecord | None:
        try:
            match action:
                case "reset_prefix_cache":
                    self._scheduler.kv.forget_prefixes()
                case "discard_cache":
                    if self._contexts:
                        raise InputError(f"{len(self._contexts)} requests use the KV cache")
                    if self._scheduler.has_work:
                        self._scheduler.step()  # applies cancellations, and collects a launched step
                    self._runtime.discard_cache()
                case "start_profile":
                    self._profiler.start()
                case "stop_profile":
                    self._profiler.stop()
        except Exception as error:
            if not isinstance(error, PenstockError):
                _LOG.exception("%s failed", action)
            return ErrorRecord.from_error(error)
        return None

    @property
    def _profiler(self) -> StepProfiler:
        if self._runtime.profiler is None:
            raise UnsupportedFeatureError("profiles", "start the server with --profile-dir")
        return self._runtime.profiler

    # -- Steps -------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Run a step if there is work, and report changes of requests. Return whether a context ran."""
        outputs: dict[str, PipelineOutput] = {}
        has_run = False
        if self._scheduler.has_work:
            heartbeat.beat()
            begin = time.perf_counter()
            try:
                with nullcontext() if self._runtime.profiler is None else self._runtime.profiler.step():
                    outputs = self._scheduler.step(self._runtime.num_steps())
            except Exception as error:
                self._report_memory_limit(error)
                raise
            has_run = self._scheduler.last_batch[0] > 0
            if has_run:
                self._count_step(time.perf_counter() - begin)
        admissions = [self._admit(context) for context in self._scheduler.admitted]
        results = [result for item in outputs.items() if (result := self._result(*item)) is not None]
        failures = self._take_failures()
        cancelled, self._cancelled = self._cancelled, []
        events = self._scheduler.kv.take_events()
        if has_run or failures or cancelled or events:
            self._send(StepResults(self._current_stats(), admissions, results, failures, cancelled, events))
        return has_run

    def _admit(self, context: RequestContext) -> Admission:
        stats, num_tokens = self._stats, len(context.prompt_tokens)
        stats.num_prompt_tokens += num_tokens
        if not context.log_probabilities_echo:  # requests with echo do not use the prefix cache
            stats.num_prefix_query_tokens += num_tokens
            stats.num_prefix_hit_tokens += context.num_cached_tokens
        return Admission(context.request_id, context.num_cached_tokens)

    def _result(self, request_id: str, output: PipelineOutput) -> RequestResult | None:
        """Count the tokens of an output, and return its message; None if it is empty and not final."""
        context = self._contexts[request_id]
        result = result_message(context, output)
        if result is not None:
            self._stats.num_generated_tokens += context.current_length - self._lengths[request_id]
            self._lengths[request_id] = context.current_length
        if output.is_done:
            self._forget(request_id)
        return result

    def _take_failures(self) -> list[Failure]:
        failures, self._refused_requests = self._refused_requests, []
        while self._scheduler.failures:
            request_id, error = self._scheduler.failures.popitem()
            self._forget(request_id)
            failures.append(self._fail(request_id, error))
        return failures

    def _report_memory_limit(self, error: Exception, *request_ids: str) -> None:
        """Report that running requests and ``request_ids`` failed, if the error shows exhausted memory."""
        if not private_memory.is_exceeded(error):
            return
        reason = ErrorRecord.from_error(private_memory.limit_error_for_requests())
        running_ids = [
            request_id for request_id, context in self._contexts.items() if context.is_assigned_to_cache
        ]
        failures = [Failure(request_id, reason) for request_id in {*running_ids, *request_ids}]
        self._send(StepResults(self._current_stats(), failures=failures))

    def _fail(self, request_id: str, error: Exception) -> Failure:
        """Return the message for a failed request. Log internal errors.

        Raises:
            Exception: ``error``, if it shows that the limit of private memory is reached.
        """
        if private_memory.is_exceeded(error):
            self._report_memory_limit(error, request_id)
            raise error
        if isinstance(error, RequestFailedError) or not isinstance(error, PenstockError):
            _LOG.error("request %s failed", request_id, exc_info=error.__cause__ or error)
        return Failure(request_id, ErrorRecord.from_error(error))

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
        self._runtime.add_counts(stats)
        return stats


def _start_failure(error: Exception) -> ErrorRecord:
    """Return the error of a failed start. It includes the details of unexpected exceptions."""
    if private_memory.is_exceeded(error):
        return ErrorRecord.from_error(private_memory.limit_error_for_load())
    if isinstance(error, PenstockError):
        return ErrorRecord.from_error(error)
    return ErrorRecord.from_error(
        UnavailableError(f"the worker could not start: {type(error).__name__}: {error}")
    )
