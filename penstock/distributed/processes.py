"""`RankProcesses`: starts and monitors the processes of all ranks except rank 0.

Rank 0 is the process that loads the model: a worker, or a program that uses the library. Rank 0 starts one
process for each other rank and has a connection to each process. A process exits when rank 0 closes this
connection or ends. For each process, rank 0 has a thread. If the process ends before `RankProcesses.close`,
the thread makes the collectives in shared memory fail on all ranks.
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
_OPENMP_VARIABLES = {"GOMP_SPINCOUNT": "100"}
"""Default environment variables of a rank, unless ``OMP_WAIT_POLICY`` is set.

With this value, an idle OpenMP thread spins 100 times before it sleeps.
"""
START_TIMEOUT = 600.0
"""Seconds that rank 0 waits for an event of the other ranks, and that they wait for the start of rank 0."""
_END_TIMEOUT = 5.0
"""Seconds that `close` waits for the processes to exit. It then kills the remaining ones."""
_DIAGNOSIS_TIMEOUT = 2.0
"""Seconds that `_diagnose` waits for a rank to end. A collective can fail before the rank has ended."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """The settings of a group of ranks."""

    world_size: int
    devices: tuple[torch.device, ...]
    """The device of each rank."""
    timeout: float
    """Seconds that a collective waits for the other ranks."""
    by_expert: bool = False
    """Whether each rank has whole experts, instead of a part of each expert."""
    shares_memory: bool = True
    """Whether ranks on CPUs exchange tensors in shared memory instead of over gloo."""
    processors: tuple[tuple[int, ...], ...] = ()
    """The ids of the processors to which each rank is bound; empty for no binding."""


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """The arguments of a rank's process, sent on its standard input."""

    rank: int
    settings: RankSettings
    target: Callable[[Ranks], None]
    """The function that the rank runs."""
    store_folder: str
    """The folder with the file of torch.distributed's ``FileStore``."""
    connection_fd: int
    """File descriptor of the connection to rank 0."""
    region_fd: int | None
    """File descriptor of the shared memory; None without shared memory."""


class RankProcesses:
    """The processes of all ranks except rank 0. `join` connects rank 0 with these processes.

    Args:
        settings: the settings of the group of ranks.
        target: the function that each process runs; picklable.
    """

    def __init__(self, settings: RankSettings, target: Callable[[Ranks], None]) -> None:
        self._settings = settings
        self._folder = tempfile.mkdtemp(prefix="penstock-ranks-")
        self._store = _open_store(self._folder, settings.world_size)
        self._is_closing = False
        self._ranks: Ranks | None = None
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._exit_statuses: dict[int, int] = {}  # rank -> exit status
        self.sentinel, self._write_end = os.pipe()
        """A file descriptor that becomes readable when one of the processes has ended before `close`."""
        self._region_fd = _create_region(settings)
        for rank in range(1, settings.world_size):
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
            PenstockError: a rank has ended, or has not started within `START_TIMEOUT` seconds.
        """
        settings = self._settings
        self.wait_for("started")
        self._store.set("started/0", "1")
        self._ranks = Ranks(
            0,
            settings.world_size,
            self._store,
            timeout=settings.timeout,
            device=settings.devices[0],
            connections=self._connections,
            region=None if self._region_fd is None else SharedRegion(self._region_fd, settings.world_size),
            by_expert=settings.by_expert,
        )
        self._ranks.diagnose = self._diagnose
        if self._exit_statuses:
            self._ranks.abort()
        return self._ranks

    def wait_for(self, event: str) -> None:
        """Wait until all other ranks have reported an event with `Ranks.mark`.

        Raises:
            PenstockError: a rank has ended. The exception is the error that the rank reported; if it reported
                none, a `RankFailedError`.
            RankFailedError: a rank has not reported the event within `START_TIMEOUT` seconds.
        """
        deadline = time.monotonic() + START_TIMEOUT
        store_keys = [f"{event}/{rank}" for rank in range(1, self._settings.world_size)]
        while not self._store.check(store_keys):
            if self._exit_statuses:
                raise self._diagnose(RuntimeError("a rank has ended"))
            if time.monotonic() > deadline:
                raise RankFailedError(f"the ranks have not {event} within {START_TIMEOUT:g} s")
            beat()
            time.sleep(0.005)

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks 1, 2 and so on."""
        return [process.pid for process in self._processes]

    def check(self) -> None:
        """Raise an error if a rank has ended before `close`.

        Raises:
            PenstockError: a rank has ended. The exception is the error that the rank reported. If it reported
                none, the exception is a `RankFailedError` with the number and the exit status of the rank.
        """
        if self._exit_statuses and not self._is_closing:
            raise self._diagnose(RuntimeError("a rank has ended"))

    def close(self) -> None:
        """End the processes, killing those that do not exit within 5 s. Later calls do nothing."""
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
        for descriptor in (self._region_fd, self.sentinel, self._write_end):
            if descriptor is not None:
                os.close(descriptor)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int, target: Callable[[Ranks], None]) -> None:
        own_end, rank_end = Pipe()
        launch = RankLaunch(rank, self._settings, target, self._folder, rank_end.fileno(), self._region_fd)
        descriptors = [rank_end.fileno()] + ([] if self._region_fd is None else [self._region_fd])
        process = subprocess.Popen(
            [sys.executable, "-c", _RANK_PROGRAM],
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=descriptors,
            env=os.environ if "OMP_WAIT_POLICY" in os.environ else {**_OPENMP_VARIABLES, **os.environ},
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
        _LOG.error("rank %d (process %d) has ended: %s", rank, process.pid, _describe_exit(status))
        if self._ranks is not None:
            self._ranks.abort()
        with contextlib.suppress(OSError):
            os.write(self._write_end, b"1")

    def _diagnose(self, error: Exception) -> PenstockError:
        """Return the error that explains a failed collective, or the end of a rank.

        This is the error that a rank has reported. If no rank has reported an error, it is a
        `RankFailedError` that contains the number of the rank that has ended, or ``error`` if no rank has
        ended.
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
                f"rank {rank} of {self._settings.world_size} has ended ({_describe_exit(status)}): the model "
                "must be loaded again"
            )
        return RankFailedError(
            f"the {self._settings.world_size} ranks of the model lost their connection ({error}): the model "
            "must be loaded again"
        )


def main() -> None:
    """Run the target of a rank in this process, and exit. The process also exits when rank 0 ends."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        # A terminal sends Ctrl-C to the whole process group; rank 0 handles it.
        signal.signal(signal_number, signal.SIG_IGN)
    launch: RankLaunch = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_exit_with_rank_0, args=(launch.store_folder,), daemon=True).start()
    settings, rank = launch.settings, launch.rank
    store = _open_store(launch.store_folder, settings.world_size)
    ranks: Ranks | None = None
    try:
        if settings.processors:
            pin(settings.processors[rank])
        store.set(f"started/{rank}", "1")
        store.wait(["started/0"], timedelta(seconds=START_TIMEOUT))
        ranks = Ranks(
            rank,
            settings.world_size,
            store,
            timeout=settings.timeout,
            device=settings.devices[rank],
            connections=[Connection(launch.connection_fd)],
            region=None if launch.region_fd is None else SharedRegion(launch.region_fd, settings.world_size),
            by_expert=settings.by_expert,
        )
        launch.target(ranks)
        status = 0
    except EOFError:  # rank 0 has closed the model
        status = 0
    except BaseException as error:
        _LOG.debug("rank %d failed", rank, exc_info=True)
        # A `RankFailedError` that this rank did not cause follows from an error that another rank reports.
        if not isinstance(error, RankFailedError) or (ranks is not None and ranks.caused_failure):
            _report_error(store, rank, error)
        status = 1
    logging.shutdown()
    os._exit(status)  # exits without waiting for threads of libraries


def _report_error(store: Store, rank: int, error: BaseException) -> None:
    """Write the error of a rank to the store, from which `RankProcesses._diagnose` reads it."""
    if not isinstance(error, PenstockError):
        _LOG.critical("rank %d failed", rank, exc_info=error)
        error = RankFailedError(f"rank {rank} failed: {type(error).__name__}: {error}")
    try:
        encoded_error = base64.b64encode(pickle.dumps(error)).decode()
        pickle.loads(base64.b64decode(encoded_error))
    except Exception:  # an error whose constructor does not take its ``args`` cannot be unpickled
        error = RankFailedError(f"rank {rank} failed: {type(error).__name__}: {error}")
        encoded_error = base64.b64encode(pickle.dumps(error)).decode()
    with contextlib.suppress(Exception):
        store.set("error", encoded_error)


def _exit_with_rank_0(store_folder: str) -> None:
    """End this process when its standard input is closed, for example because rank 0 ends."""
    os.read(0, 1)
    shutil.rmtree(store_folder, ignore_errors=True)
    os._exit(1)


def _open_store(folder: str, world_size: int) -> Store:
    return FileStore(f"{folder}/store", world_size)


def _create_region(settings: RankSettings) -> int | None:
    """Return the file descriptor of new shared memory; None if the ranks use torch.distributed only."""
    are_all_cpus = all(device.type == "cpu" for device in settings.devices)
    if not are_all_cpus or not settings.shares_memory:
        return None
    return SharedRegion.create(settings.world_size, settings.timeout)


def _describe_exit(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
