"""What processes hold, read from ``/proc``: a process and all that descend from it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

_PATIENCE = 10.0  # seconds that an engine has to end by itself
_SAMPLES_PER_SECOND = 50


def family(pid: int) -> list[int]:
    """The process and its descendants; those that are there now."""
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
    """Memory of the whole family that no file stands behind. Shared memory counts once per process."""
    total = 0
    for one in family(pid):
        try:
            lines = Path(f"/proc/{one}/status").read_text().splitlines()
        except OSError:  # it has ended meanwhile
            continue
        for line in lines:
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += 1024 * int(line.split()[1])
    return total


class PeakMemory:
    """The largest `anonymous_bytes` of a family so far, looked at 50 times a second until `stop`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._bytes = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Bytes; a second call says the same again."""
        self._end.set()
        self._thread.join()
        return self._bytes

    def _watch(self) -> None:
        while True:
            self._bytes = max(self._bytes, anonymous_bytes(self._pid))
            if self._end.wait(1 / _SAMPLES_PER_SECOND):
                return


def stop_all(process: subprocess.Popen[str]) -> None:
    """Waits for a process that leads a session of its own; kills the session where it does not end."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(_PATIENCE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _stat(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` from the state on; empty where the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
