"""Memory of a process and its descendants, read from ``/proc``."""

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


def family(pid: int) -> list[int]:
    """Return the ids of a process and of its running descendants."""
    children = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        if fields := _stat(int(folder.name)):
            children[int(fields[1])].append(int(folder.name))
    found, left = [], [pid]
    while left:
        found.append(one := left.pop())
        left += children[one]
    return found


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process and its descendants.

    Shared memory counts once per process.
    """
    total = 0
    for one in family(pid):
        try:
            lines = Path(f"/proc/{one}/status").read_text().splitlines()
        except OSError:  # the process has ended
            continue
        for line in lines:
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += 1024 * int(line.split()[1])
    return total


class PeakMemory:
    """The peak of `anonymous_bytes` of a process, sampled 50 times per second until `stop`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._bytes = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Stop sampling and return the peak in bytes. Further calls return the same value."""
        self._end.set()
        self._thread.join()
        return self._bytes

    def _watch(self) -> None:
        while True:
            self._bytes = max(self._bytes, anonymous_bytes(self._pid))
            if self._end.wait(1 / _SAMPLES_PER_SECOND):
                return


def stop_all(process: subprocess.Popen[str]) -> None:
    """Wait for a process that leads its own session. Kills the session after a timeout."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_TIMEOUT)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
