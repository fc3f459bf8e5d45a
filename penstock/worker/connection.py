"""`WorkerConnection`: the process or thread of one run of a worker, and the sockets to the worker.

The worker process holds the write end of a pipe and never writes to it. When the process ends for any reason,
the pipe is closed, which wakes the event loop of the server. The worker detects the end of the server in the
same way: its standard input is a pipe whose write end the server holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import zmq

from penstock.host.heartbeat import ProgressFile
from penstock.worker.main import OUT_OF_MEMORY_STATUS, WorkerLaunch
from penstock.worker.messages import Command, Started, WorkerMessage, command_encoder, report_decoder
from penstock.worker.process import Endpoint, WorkerRuntime, run_worker

_LOG = logging.getLogger("penstock.worker")

_WORKER_PROGRAM = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from penstock.worker.main import main; main()"
)
"""Program of the worker process. ``multiprocessing`` is not used, because it would run the main module again.
"""

_OPENMP_VARIABLES = {"GOMP_SPINCOUNT": "100"}
"""Environment variables of the worker, if the server's environment has neither them nor ``OMP_WAIT_POLICY``.

A waiting OpenMP thread then spins 100 times before it sleeps.

Without this setting, waiting threads spin for milliseconds. If the server needs a core at the same time, the
spinning threads can occupy the core of the thread for which they wait. A step then takes ten times as long.
"""


class _WorkerHost(Protocol):
    """The process or thread in which a worker runs."""

    sentinel: int
    """A file descriptor that becomes readable when the worker ends."""

    def is_suspended(self) -> bool:
        """Return whether a signal (SIGSTOP) has suspended the worker."""

    def end(self) -> str:
        """End the worker if possible. Return how it ended; ``still running`` if a thread has not ended."""


class _Process:
    def __init__(
        self, factory: Callable[[], WorkerRuntime], endpoint: Endpoint, memory_limit: int | None
    ) -> None:
        self.sentinel, write_end = os.pipe()
        self._is_limited = memory_limit is not None
        launch = WorkerLaunch(factory, endpoint, time.time(), memory_limit)
        data = pickle.dumps(sys.path) + pickle.dumps(launch)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _WORKER_PROGRAM],
                stdin=subprocess.PIPE,
                stdout=2,  # keeps the output of libraries out of the server's standard output
                pass_fds=(write_end,),
                env=os.environ if "OMP_WAIT_POLICY" in os.environ else {**_OPENMP_VARIABLES, **os.environ},
            )
        finally:
            os.close(write_end)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended, so the sentinel is readable
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def is_suspended(self) -> bool:
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return False  # the process has ended, or the system has no /proc
        return stat.rpartition(")")[2].split()[0] == "T"

    def end(self) -> str:
        self._process.kill()
        status = self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        if status == OUT_OF_MEMORY_STATUS:
            return "out of memory: its private memory has reached --worker-memory-limit"
        if status >= 0:
            return f"exit status {status}"
        # If an allocation fails in native code that cannot raise an error, the process aborts.
        hint = ", perhaps at --worker-memory-limit" if self._is_limited and -status == signal.SIGABRT else ""
        return f"killed by {signal.Signals(-status).name}{hint}"


class _Thread:
    """A worker in a thread, for tests and notebooks. The thread cannot be killed and has no memory limit."""

    def __init__(
        self, factory: Callable[[], WorkerRuntime], endpoint: Endpoint, memory_limit: int | None
    ) -> None:
        assert memory_limit is None
        self.sentinel, self._write_end = os.pipe()
        self._outcome = "still running"
        self._thread = threading.Thread(target=self._run, args=(factory, endpoint), daemon=True)
        self._thread.start()

    def _run(self, factory: Callable[[], WorkerRuntime], endpoint: Endpoint) -> None:
        try:
            run_worker(factory, endpoint)
            self._outcome = "stopped"
        except BaseException as error:
            _LOG.critical("the worker failed", exc_info=True)
            self._outcome = f"{type(error).__name__}: {error}"
        finally:
            os.close(self._write_end)

    def is_suspended(self) -> bool:
        return False

    def end(self) -> str:
        self._thread.join(timeout=0.2)
        return self._outcome


class WorkerConnection:
    """Launches a worker, and transfers commands and reports after `attach`.

    Args:
        context: the ZeroMQ context of the server.
        factory: loads the model in the worker; picklable, unless ``in_thread``.
        endpoint: the addresses of the sockets. Each connection needs separate addresses.
        in_thread: whether the worker runs in a thread of this process.
        memory_limit: limit of the process's private memory, in bytes. None for no limit, and for a thread.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        factory: Callable[[], WorkerRuntime],
        endpoint: Endpoint,
        *,
        in_thread: bool,
        memory_limit: int | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._progress = ProgressFile(endpoint.progress)
        self._reports = context.socket(zmq.PULL)
        self._reports.bind(endpoint.reports)
        self._commands = context.socket(zmq.PUSH)
        self._commands.linger = 0
        self._commands.sndhwm = 0  # the engine client bounds the number of requests
        self._encode, self._decode = command_encoder(), report_decoder()
        self._host: _WorkerHost = (_Thread if in_thread else _Process)(factory, endpoint, memory_limit)
        self._reports_fd = int(self._reports.getsockopt(zmq.FD))
        self._loop: asyncio.AbstractEventLoop | None = None
        self.end_event = asyncio.Event()
        """Set when the worker has ended."""

    def attach(self, on_report: Callable[[WorkerMessage], None]) -> None:
        """Register ``on_report``, which is called with each report in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._on_report = on_report
        self._loop.add_reader(self._reports_fd, self.drain)
        self._loop.add_reader(self._host.sentinel, self._on_end)
        # Reports that have already arrived do not wake the event loop.
        self._loop.call_soon(self.drain)

    def send(self, command: Command) -> None:
        """Send a command. Never blocks. The worker must have sent `Started`."""
        self._commands.send_multipart(self._encode(command), zmq.NOBLOCK)

    def drain(self) -> None:
        """Process all reports that have arrived."""
        while not self._reports.closed:
            try:
                frame = self._reports.recv(zmq.NOBLOCK)
            except zmq.Again:
                return  # ZeroMQ signals the next report only after the queue was empty
            report = self._decode(frame)
            if isinstance(report, Started):
                self._commands.connect(self._endpoint.commands)
            self._on_report(report)

    @property
    def is_suspended(self) -> bool:
        """Whether a signal has suspended the worker's process."""
        return self._host.is_suspended()

    @property
    def progress(self) -> int:
        """The value of the worker's progress counter; constant for a worker in a thread."""
        return self._progress.count

    def close(self) -> str:
        """Kill the worker's process, or wait up to 0.2 s for its thread. Return how the worker ended."""
        if self._loop is not None:
            self._loop.remove_reader(self._reports_fd)
            self._loop.remove_reader(self._host.sentinel)
        self._reports.close(linger=0)
        self._commands.close(linger=0)
        outcome = self._host.end()
        os.close(self._host.sentinel)
        self._progress.close()
        return outcome

    def _on_end(self) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._host.sentinel)
        self.end_event.set()
