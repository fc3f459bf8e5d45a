"""Records profiles of a worker's steps in files."""

from __future__ import annotations

import cProfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import InputError

if TYPE_CHECKING:
    import torch


class StepProfiler:
    """Profiles the worker between `start` and `stop`: Python function calls of steps, and torch operations.

    `stop` writes two files into the folder: ``NAME-TIME.pstats`` with the function calls, for `pstats`, and
    ``NAME-TIME.trace.json`` with the operations, for Perfetto or ``chrome://tracing``. Each step is a range
    of the trace.

    Args:
        folder: the folder of the files. `start` creates it.
        name: the beginning of the file names.
    """

    def __init__(self, folder: str, name: str) -> None:
        self._folder = Path(folder)
        self._name = name
        self._calls: cProfile.Profile | None = None
        self._trace: torch.profiler.profile | None = None

    def start(self) -> None:
        """Start recording.

        Raises:
            InputError: a profile is already being recorded, or the folder cannot be created.
        """
        if self._calls is not None:
            raise InputError("a profile is being recorded already: stop it first")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"the folder {self._folder} cannot be created: {error.strerror}") from error
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._trace = torch.profiler.profile(activities=activities)
        self._trace.start()
        self._calls = cProfile.Profile()

    def stop(self) -> None:
        """Stop recording, and write the files.

        Raises:
            InputError: no profile is being recorded, or the files cannot be written.
        """
        calls, trace = self._calls, self._trace
        if calls is None or trace is None:
            raise InputError("no profile is being recorded: start one first")
        self._calls = self._trace = None
        trace.stop()
        file = self._folder / f"{self._name}-{time.strftime('%Y%m%d-%H%M%S')}"
        try:
            calls.create_stats()
            calls.dump_stats(f"{file}.pstats")
            trace.export_chrome_trace(f"{file}.trace.json")
        except OSError as error:
            raise InputError(f"the profile cannot be written to {file}: {error.strerror}") from error

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager that records its block as a step if a profile is being recorded."""
        if self._calls is None:
            yield
            return
        import torch

        with torch.profiler.record_function("scheduler step"):
            self._calls.enable()
            try:
                yield
            finally:
                self._calls.disable()
