"""The memory of a process and its descendants, from ``/proc``, and the termination of a process group."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

_EXIT_TIMEOUT = 10.0  # seconds until an engine that does not exit is killed
_SAMPLES_PER_SECOND = 50


def process_tree(pid: int) -> list[int]:
    """Return ``pid`` and the ids of its descendants. Ended descendants are included until they are reaped."""
    children = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        if fields := _stat(int(folder.name)):
            children[int(fields[1])].append(int(folder.name))
    tree, pending = [], [pid]
    while pending:
        tree.append(tree_pid := pending.pop())
        pending += children[tree_pid]
    return tree


def anonymous_and_shared_bytes(pid: int) -> int:
    """Return the resident bytes of anonymous and shared memory of a process and its descendants.

    Shared memory counts once for each process that maps it.
    """
    total_bytes = 0
    for tree_pid in process_tree(pid):
        try:
            lines = Path(f"/proc/{tree_pid}/status").read_text().splitlines()
        except OSError:  # the process ended after process_tree() found it
            continue
        for line in lines:
            if line.startswith(("RssAnon:", "RssShmem:")):
                total_bytes += 1024 * int(line.split()[1])
    return total_bytes


class PeakMemory:
    """Samples `anonymous_and_shared_bytes` of a process until `stop`, at most 50 times per second."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak_bytes = 0
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Stop sampling and return the peak in bytes. Further calls return the same value."""
        self._stop_event.set()
        self._thread.join()
        return self._peak_bytes

    def _watch(self) -> None:
        while True:
            self._peak_bytes = max(self._peak_bytes, anonymous_and_shared_bytes(self._pid))
            if self._stop_event.wait(1 / _SAMPLES_PER_SECOND):
                return


def end_session(process: subprocess.Popen[str]) -> None:
    """Wait up to 10 s until a session leader exits. Then kill all processes of its group."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_TIMEOUT)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the command name. Empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
