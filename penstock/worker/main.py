"""The worker process: reads a `WorkerLaunch` from standard input, and runs the worker."""

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

import msgspec

from penstock.errors import RankFailedError
from penstock.host import heartbeat, private_memory
from penstock.host.garbage_collection import gc_disabled
from penstock.worker.process import Endpoint, WorkerRuntime, run_worker

_LOG = logging.getLogger("penstock.worker")

OUT_OF_MEMORY_STATUS = 12
"""Exit status of a worker that has reached its limit of private memory (the number of ``ENOMEM``)."""


@dataclass(frozen=True)
class WorkerLaunch:
    """The arguments of the worker process, sent on its standard input, which then stays open."""

    factory: Callable[[], WorkerRuntime]
    endpoint: Endpoint
    launched_at: float
    """``time.time()`` at the launch."""
    memory_limit: int | None = None
    """Limit of private memory, in bytes; None for no limit."""


def main() -> None:
    """Run a worker in this process until `Stop` arrives or the parent process ends.

    Ends the process with status 0 after `Stop` or a reported failure of the start, with
    `OUT_OF_MEMORY_STATUS` at the limit of private memory, and otherwise with 1.
    """
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        # A terminal sends signals to the whole process group. Only the parent handles them.
        signal.signal(signal_number, signal.SIG_IGN)
    launch: WorkerLaunch = pickle.load(sys.stdin.buffer)
    start_time = time.time()
    heartbeat.publish(launch.endpoint.progress)
    threading.Thread(target=_exit_with_parent, args=(launch.endpoint.folder,), daemon=True).start()

    def load() -> WorkerRuntime:
        if launch.memory_limit is not None:
            private_memory.set_limit(launch.memory_limit)
        with gc_disabled():
            runtime = launch.factory()
        gc.collect()
        gc.freeze()  # excludes the loaded objects, which are never freed, from garbage collections
        startup = [("process", start_time - launch.launched_at), *runtime.info.startup]
        return replace(runtime, info=msgspec.structs.replace(runtime.info, startup=startup))

    try:
        run_worker(load, launch.endpoint)
        status = 0
    except BaseException as error:
        if private_memory.is_exceeded(error):
            reason = f"{type(error).__name__}: {error}"
            _LOG.critical("the worker has reached its limit of private memory and ends (%s)", reason)
            status = OUT_OF_MEMORY_STATUS
        elif isinstance(error, RankFailedError):  # the message of the error contains the rank and the reason
            _LOG.critical("the worker ends: %s", error)
            status = 1
        else:
            _LOG.critical("the worker failed", exc_info=True)
            status = 1
    logging.shutdown()
    os._exit(status)  # exits without waiting for threads of libraries


def _exit_with_parent(folder: str) -> None:
    """End this process when its standard input is closed, which happens when its parent ends."""
    os.read(0, 1)  # not sys.stdin.read, which would hold a lock
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
