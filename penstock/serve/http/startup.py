"""Start-up times: the phases of the server and the worker, and their report when the server is ready."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.serve.observability.logs import log_event, print_notice

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartupPhase:
    """A phase of the start, in the server or in the worker. The two processes start in parallel."""

    name: str
    process: str  # "server" or "worker"
    seconds: float


class Startup:
    """Measures the total time and the phases of the server's start."""

    def __init__(self) -> None:
        self._started_at = time.perf_counter() - process_age()
        self.phases: list[StartupPhase] = []

    @property
    def seconds(self) -> float:
        """Seconds since the process started, or since the object was created if the start is unknown."""
        return time.perf_counter() - self._started_at

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase in this process. A phase that raises is not added."""
        started_at = time.perf_counter()
        yield
        self.phases.append(StartupPhase(name, "server", time.perf_counter() - started_at))

    def add_worker(self, phases: Iterable[tuple[str, float]]) -> None:
        """Add the phases that the worker reports."""
        self.phases += [StartupPhase(name, "worker", seconds) for name, seconds in phases]


def process_age() -> float:
    """Return the seconds since this process started; 0 if the system does not report them."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return 0.0
    return max(0.0, uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


def report_ready(startup: Startup, url: str, model: str, log_format: str) -> None:
    """Report that the server is ready, with the phases, the model's name and the URL.

    With the log format ``json``, log the report. Otherwise print it to standard error.
    """
    total = startup.seconds
    if log_format == "json":
        phases = {f"{phase.process}: {phase.name}": round(phase.seconds, 3) for phase in startup.phases}
        log_event(_log, logging.INFO, "ready", url=url, model=model, seconds=round(total, 3), phases=phases)
        return
    if sys.stderr is not None and sys.stderr.isatty():
        with suppress(OSError):
            _print_table(startup)
    else:
        for phase in startup.phases:
            print_notice(f"penstock: {phase.process} {phase.name}: {phase.seconds:.2f} s")
    print_notice(f"penstock: serving {model} at {url} (ready after {total:.2f} s)")


def _print_table(startup: Startup) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="start-up")
    table.add_column("phase")
    table.add_column("process")
    table.add_column("seconds", justify="right")
    for phase in startup.phases:
        table.add_row(phase.name, phase.process, f"{phase.seconds:.2f}")
    Console(stderr=True).print(table)
