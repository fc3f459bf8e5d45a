"""One life of a worker: its process or thread, the sockets to it, and the news of its end.

The process holds the write end of a pipe and never writes: when it ends, however it ends, the pipe does. In
the same way it sees by its standard input that the serving side is gone.
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
from penstock.worker.messages import Command, Started, WorkerMessage, command_encoder, report_decoder
from penstock.worker.process import OUT_OF_MEMORY, Endpoint, WorkerLaunch, WorkerRuntime, run_worker

_LOG = logging.getLogger("penstock.worker")

_BOOT = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from penstock.worker.process import main; main()"
)
"""A plain interpreter rather than ``multiprocessing``, which would run the user's main module once more."""

_PATIENT = {"GOMP_SPINCOUNT": "100"}
"""Kernels' threads that wait for each other sleep soon. By default they spin for milliseconds, and where the
server needs a core too that is time the one they wait for does not get: steps take ten times as long."""


class _Body(Protocol):
    """What a worker runs in."""

    sentinel: int
    """A file descriptor that reads as ended when the worker has."""

    def is_suspended(self) -> bool:
        """Whether it was told to stand still (SIGSTOP), and will not move by itself."""

    def end(self) -> str:
        """Makes sure that it has ended, if that can be done, and says how it did."""


class _Process:
    def __init__(
        self, factory: Callable[[], WorkerRuntime], endpoint: Endpoint, memory_limit: int | None
    ) -> None:
        self.sentinel, held = os.pipe()
        self._is_limited = memory_limit is not None
        told = WorkerLaunch(factory, endpoint, time.time(), memory_limit)
        launch = pickle.dumps(sys.path) + pickle.dumps(told)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT],
                stdin=subprocess.PIPE,
                stdout=2,  # what libraries print does not get between the server's own lines
                pass_fds=(held,),
                env=os.environ if "OMP_WAIT_POLICY" in os.environ else {**_PATIENT, **os.environ},
            )
        finally:
            os.close(held)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the sentinel tells
            self._process.stdin.write(launch)
            self._process.stdin.flush()

    def is_suspended(self) -> bool:
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return False  # it has ended, or the system does not say
        return stat.rpartition(")")[2].split()[0] == "T"

    def end(self) -> str:
        self._process.kill()
        status = self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        if status == OUT_OF_MEMORY:
            return "out of memory: its private memory has reached --worker-memory-limit"
        if status >= 0:
            return f"exit status {status}"
        # Native code aborts where it cannot report that an allocation failed.
        hint = ", perhaps at --worker-memory-limit" if self._is_limited and -status == signal.SIGABRT else ""
        return f"killed by {signal.Signals(-status).name}{hint}"


class _Thread:
    """For tests and notebooks: as a process, but it cannot be killed, and its memory is not its own."""

    def __init__(
        self, factory: Callable[[], WorkerRuntime], endpoint: Endpoint, memory_limit: int | None
    ) -> None:
        assert memory_limit is None
        self.sentinel, self._held = os.pipe()
        self._end = "still running"
        self._thread = threading.Thread(target=self._run, args=(factory, endpoint), daemon=True)
        self._thread.start()

    def _run(self, factory: Callable[[], WorkerRuntime], endpoint: Endpoint) -> None:
        try:
            run_worker(factory, endpoint)
            self._end = "stopped"
        except BaseException as error:
            _LOG.critical("the worker gives up", exc_info=True)
            self._end = f"{type(error).__name__}: {error}"
        finally:
            os.close(self._held)

    def is_suspended(self) -> bool:
        return False

    def end(self) -> str:
        self._thread.join(timeout=0.2)
        return self._end


class WorkerConnection:
    """Starts a worker at once, and carries commands and reports once it is attached to an event loop.

    Args:
        context: the sockets' context, of the serving side.
        factory: makes the worker's work; picklable, unless ``in_thread``.
        endpoint: where the two meet; used by no other link.
        in_thread: a thread of this process instead of a process.
        memory_limit: bytes of private memory that the process may take.
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
        self._commands.sndhwm = 0  # bounded by whoever sends: by the requests that are let in
        self._encode, self._decode = command_encoder(), report_decoder()
        self._body: _Body = (_Thread if in_thread else _Process)(factory, endpoint, memory_limit)
        self._reports_fd = int(self._reports.getsockopt(zmq.FD))
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ended = asyncio.Event()
        """Set when the worker has ended."""

    def attach(self, hear: Callable[[WorkerMessage], None]) -> None:
        """Calls ``hear`` with each report from now on, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._on_report = hear
        self._loop.add_reader(self._reports_fd, self.drain)
        self._loop.add_reader(self._body.sentinel, self._on_end)
        self._loop.call_soon(self.drain)  # what came before does not wake anybody

    def send(self, command: Command) -> None:
        """Never blocks. There is nobody to hear it before the worker has started."""
        self._commands.send(self._encode(command), zmq.NOBLOCK)

    def drain(self) -> None:
        """Takes all reports that are here."""
        while not self._reports.closed:
            try:
                frame = self._reports.recv(zmq.NOBLOCK)
            except zmq.Again:
                return  # only now the descriptor is sure to wake the loop for the next one
            report = self._decode(frame)
            if isinstance(report, Started):
                self._commands.connect(self._endpoint.commands)
            self._on_report(report)

    @property
    def is_suspended(self) -> bool:
        """Whether the worker's process stands still, by a signal."""
        return self._body.is_suspended()

    @property
    def progress(self) -> int:
        """How much progress the worker has counted. One in a thread counts none."""
        return self._progress.count

    def close(self) -> str:
        """Ends the worker, by force where it has not ended, and says how it did."""
        if self._loop is not None:
            self._loop.remove_reader(self._reports_fd)
            self._loop.remove_reader(self._body.sentinel)
        self._reports.close(linger=0)
        self._commands.close(linger=0)
        words = self._body.end()
        os.close(self._body.sentinel)
        self._progress.close()
        return words

    def _on_end(self) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._body.sentinel)
        self.ended.set()
