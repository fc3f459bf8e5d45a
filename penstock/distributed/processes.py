"""`RankProcesses`: starts and monitors the processes of the ranks from 1 on.

Rank 0 is the process that loads the model: a worker, or a program. It starts the other ranks and holds one
end of a connection to each. A rank ends when its connection to rank 0 is closed. Rank 0 has one
thread per other rank, which waits for its process. If the process ends, the thread makes the collectives of
all ranks fail.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe

import torch
from torch._C._distributed_c10d import FileStore, Store

from penstock.distributed.ranks import Ranks
from penstock.distributed.region import SharedRegion
from penstock.errors import PenstockError, RankFailedError
from penstock.host.heartbeat import beat
from penstock.host.processors import pin

_LOG = logging.getLogger("penstock.distributed")

_RANK_PROGRAM = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from penstock.distributed.processes import main; main()"
)
_SPIN_VARIABLES = {"GOMP_SPINCOUNT": "100"}
START_TIMEOUT = 600.0
"""Seconds that rank 0 and the other ranks wait for each other's events, such as the start."""
_END_TIMEOUT = 5.0
"""Seconds to wait for a rank to exit before it is killed."""
_DIAGNOSIS_TIMEOUT = 2.0
"""Seconds to wait after a failed collective until the process of the rank that caused the failure ends."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """The settings of a group of ranks."""

    world: int
    devices: tuple[torch.device, ...]
    """The device of each rank."""
    timeout: float
    """Seconds that a collective waits for the other ranks."""
    by_expert: bool = False
    """Whether each rank has whole experts, instead of a part of each expert."""
    shares_memory: bool = True
    """Whether ranks on CPUs exchange tensors in shared memory."""
    cores: tuple[tuple[int, ...], ...] = ()
    """The processors that each rank is bound to; empty for no binding."""


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """The arguments of a rank's process, sent on its standard input."""

    rank: int
    settings: RankSettings
    target: Callable[[Ranks], None]
    """The function that the rank runs."""
    folder: str
    """The folder with the file of torch.distributed's ``FileStore``."""
    connection: int
    """File descriptor of the connection to rank 0."""
    region: int | None
    """File descriptor of the shared memory."""


class RankProcesses:
    """The processes of the ranks from 1 on. `join` connects rank 0 with them.

    Args:
        settings: the number of ranks and their devices.
        target: the function that the other ranks run; picklable.
    """

    def __init__(self, settings: RankSettings, target: Callable[[Ranks], None]) -> None:
        self._settings = settings
        self._folder = tempfile.mkdtemp(prefix="penstock-ranks-")
        self._store = _store(self._folder, settings.world)
        self._is_closing = False
        self._ranks: Ranks | None = None
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._exit_statuses: dict[int, int] = {}  # rank -> exit status
        self.sentinel, self._write_end = os.pipe()
        """A file descriptor that becomes readable when a rank has ended before `close`."""
        self._region = _create_region(settings)
        for rank in range(1, settings.world):
            self._start(rank, target)
        self._watchers = [
            threading.Thread(target=self._watch, args=(rank, process), daemon=True)
            for rank, process in enumerate(self._processes, 1)
        ]
        for watcher in self._watchers:
            watcher.start()

    def join(self) -> Ranks:
        """Connect this process, as rank 0, with the other ranks.

        Raises:
            PenstockError: a rank could not start.
        """
        settings = self._settings
        self.wait_for("started")
        self._store.set("started/0", "1")
        self._ranks = Ranks(
            0,
            settings.world,
            self._store,
            timeout=settings.timeout,
            device=settings.devices[0],
            connections=self._connections,
            region=None if self._region is None else SharedRegion(self._region, settings.world),
            by_expert=settings.by_expert,
        )
        self._ranks.diagnose = self._diagnose
        if self._exit_statuses:
            self._ranks.abort()
        return self._ranks

    def wait_for(self, event: str) -> None:
        """Wait until all other ranks have marked an event (`Ranks.mark`).

        Raises:
            PenstockError: a rank has ended. The exception is the error that the rank reported, if any.
            RankFailedError: the event has not occurred within `START_TIMEOUT` seconds.
        """
        deadline = time.monotonic() + START_TIMEOUT
        names = [f"{event}/{rank}" for rank in range(1, self._settings.world)]
        while not self._store.check(names):
            if self._exit_statuses:
                raise self._diagnose(RuntimeError("a rank has ended"))
            if time.monotonic() > deadline:
                raise RankFailedError(f"the ranks have not {event} within {START_TIMEOUT:g} s")
            beat()
            time.sleep(0.005)

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks from 1 on."""
        return [process.pid for process in self._processes]

    def check(self) -> None:
        """Raise an error if a rank has ended.

        Raises:
            PenstockError: a rank has ended. The exception is the error that the rank reported, if any.
                Otherwise its message contains the number and the exit status of the rank.
        """
        if self._exit_statuses and not self._is_closing:
            raise self._diagnose(RuntimeError("a rank has ended"))

    def close(self) -> None:
        """End the processes. Does nothing after the first call."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._ranks is not None:
            self._ranks.close()
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + _END_TIMEOUT
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.01))
            if process.poll() is None:
                process.kill()
                process.wait()
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.close()
        for watcher in self._watchers:
            watcher.join(_END_TIMEOUT)
        for descriptor in (self._region, self.sentinel, self._write_end):
            if descriptor is not None:
                os.close(descriptor)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int, target: Callable[[Ranks], None]) -> None:
        own_end, rank_end = Pipe()
        launch = RankLaunch(rank, self._settings, target, self._folder, rank_end.fileno(), self._region)
        descriptors = [rank_end.fileno()] + ([] if self._region is None else [self._region])
        process = subprocess.Popen(
            [sys.executable, "-c", _RANK_PROGRAM],
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=descriptors,
            env=os.environ if "OMP_WAIT_POLICY" in os.environ else {**_SPIN_VARIABLES, **os.environ},
        )
        rank_end.close()
        self._connections.append(own_end)
        self._processes.append(process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `_watch` reports that the process has ended
            process.stdin.write(pickle.dumps(sys.path) + pickle.dumps(launch))
            process.stdin.flush()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        self._exit_statuses.setdefault(rank, status)
        if self._is_closing:
            return
        _LOG.error("rank %d (process %d) has ended: %s", rank, process.pid, _describe(status))
        if self._ranks is not None:
            self._ranks.abort()
        with contextlib.suppress(OSError):
            os.write(self._write_end, b"1")

    def _diagnose(self, error: Exception) -> PenstockError:
        """Return the error that a rank has reported; otherwise an error that names the rank that has ended.

        If no process has ended within `_DIAGNOSIS_TIMEOUT`, the returned error contains ``error``.
        """
        deadline = time.monotonic() + _DIAGNOSIS_TIMEOUT
        while not self._exit_statuses and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._store.check(["error"]):
            reported_error = pickle.loads(base64.b64decode(self._store.get("error")))
            assert isinstance(reported_error, PenstockError)
            return reported_error
        if self._exit_statuses:
            rank, status = next(iter(self._exit_statuses.items()))
            return RankFailedError(
                f"rank {rank} of {self._settings.world} has ended ({_describe(status)}): the model must be "
                "loaded again"
            )
        return RankFailedError(
            f"the {self._settings.world} ranks of the model lost their connection ({error}): the model must "
            "be loaded again"
        )


def main() -> None:
    """Run the target of a rank in this process, and exit. The process also exits when rank 0 ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C is sent to the whole process group; rank 0 handles it
    launch: RankLaunch = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_exit_with_rank_0, args=(launch.folder,), daemon=True).start()
    settings, rank = launch.settings, launch.rank
    store = _store(launch.folder, settings.world)
    try:
        if settings.cores:
            pin(settings.cores[rank])
        store.set(f"started/{rank}", "1")
        store.wait(["started/0"], timedelta(seconds=START_TIMEOUT))
        ranks = Ranks(
            rank,
            settings.world,
            store,
            timeout=settings.timeout,
            device=settings.devices[rank],
            connections=[Connection(launch.connection)],
            region=None if launch.region is None else SharedRegion(launch.region, settings.world),
            by_expert=settings.by_expert,
        )
        launch.target(ranks)
        status = 0
    except EOFError:  # rank 0 has closed the model
        status = 0
    except BaseException as error:
        _LOG.debug("rank %d failed", rank, exc_info=True)
        if not isinstance(error, RankFailedError):  # only the error of the rank that failed first is reported
            _report_error(store, rank, error)
        status = 1
    logging.shutdown()
    os._exit(status)  # exits without waiting for threads of libraries


def _report_error(store: Store, rank: int, error: BaseException) -> None:
    """Store the error of a rank, for rank 0."""
    if not isinstance(error, PenstockError):
        _LOG.critical("rank %d failed", rank, exc_info=error)
        error = RankFailedError(f"rank {rank} failed: {type(error).__name__}: {error}")
    try:
        content = base64.b64encode(pickle.dumps(error)).decode()
        pickle.loads(base64.b64decode(content))
    except Exception:  # an error whose constructor does not take its ``args`` cannot be unpickled
        error = RankFailedError(f"rank {rank} failed: {type(error).__name__}: {error}")
        content = base64.b64encode(pickle.dumps(error)).decode()
    with contextlib.suppress(Exception):
        store.set("error", content)


def _exit_with_rank_0(folder: str) -> None:
    """End this process when its standard input is closed, which happens when rank 0 ends."""
    os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _store(folder: str, world: int) -> Store:
    return FileStore(f"{folder}/store", world)


def _create_region(settings: RankSettings) -> int | None:
    on_host = all(device.type == "cpu" for device in settings.devices)
    return (
        SharedRegion.create(settings.world, settings.timeout) if on_host and settings.shares_memory else None
    )


def _describe(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
