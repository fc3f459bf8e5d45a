"""An engine that runs as a child process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from benchmarks.peers.processes import PeakMemory, stop_all

ROOT = Path(__file__).parents[2]
_LAST_LINES = 30  # lines of a failed engine's log in the error message
_OPENMP = ("OMP_", "GOMP_", "KMP_")


class EngineError(Exception):
    """An engine ended, or its answer is invalid."""


def _inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_OPENMP)}


class Engine:
    """A driver that runs in the Python of a virtual environment. As a context manager, it ends the process.

    Between two requests, the process and its children are stopped (SIGSTOP). Otherwise an engine whose
    threads spin while they wait would take CPU time from the other engine.

    Args:
        command: the command that starts the driver.
        load: the load request: the fields of the driver's ``Settings``.
        environment: environment variables of the driver, added to those of this process. The driver does not
            inherit variables that tune OpenMP: a value that suits one engine may halve the speed of another.
        log: the file for the driver's output.
        watch_memory: sample the memory from the start. This costs some speed.

    Raises:
        EngineError: the engine failed to load. The message names the log.
    """

    def __init__(
        self,
        command: Sequence[str],
        load: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
        watch_memory: bool = False,
    ) -> None:
        self.log = log
        self._started = perf_counter()
        with log.open("w") as printed:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                text=True,
                cwd=ROOT,
                env={**_inherited(), "PYTHONPATH": str(ROOT), **environment},
                start_new_session=True,  # a signal to the group reaches its children too
            )
        self._memory = PeakMemory(self._process.pid) if watch_memory else None
        try:
            self.versions: dict[str, str] = self._ask({"do": "load", **load})["versions"]
        except BaseException:
            self.close()
            raise
        self.seconds_to_load = perf_counter() - self._started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def process_id(self) -> int:
        """Process id of the driver. The driver leads its own session."""
        return self._process.pid

    def generate(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Run one request. Returns ``tokens``, ``first``, ``num_first`` and ``seconds``.

        Raises:
            EngineError: the engine failed, or did not return ``new_tokens`` tokens for each prompt.
        """
        answer = self._ask({"do": "generate", "prompts": prompts, "new_tokens": new_tokens})
        lengths = {len(tokens) for tokens in answer["tokens"]}
        if len(answer["tokens"]) != len(prompts) or lengths != {new_tokens}:
            raise EngineError(
                f"asked for {len(prompts)} x {new_tokens} tokens, got {len(answer['tokens'])} answers "
                f"of {sorted(lengths)} tokens; see {self.log}"
            )
        return answer

    def seconds_since_start(self) -> float:
        """Return the seconds since the process was started."""
        return perf_counter() - self._started

    def peak_bytes(self) -> int:
        """Return the peak of the anonymous memory of the process and its children."""
        assert self._memory is not None, "the engine needs watch_memory=True"
        return self._memory.stop()

    def close(self) -> None:
        """End the process and its children."""
        if self._memory is not None:
            self._memory.stop()
        assert self._process.stdin is not None
        with suppress(ProcessLookupError):
            self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        stop_all(self._process)

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._signal(signal.SIGCONT)
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (BrokenPipeError, ProcessLookupError):
            line = ""
        if not line:
            code = self._process.wait()
            end = "\n".join(self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
            raise EngineError(f"the engine ended with {code}; the end of {self.log}:\n{end}")
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)
