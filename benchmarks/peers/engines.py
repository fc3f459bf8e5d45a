"""An engine as a child process, loaded and waiting for its turn."""

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
_LAST_LINES = 30  # of what a failed engine printed
_OPENMP = ("OMP_", "GOMP_", "KMP_")


class EngineError(Exception):
    """An engine ended, or said what is no answer."""


def _inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_OPENMP)}


class Engine:
    """A driver run by the Python of a virtual environment; a context manager that ends it.

    Between two requests it is stopped, threads and children too: engines whose threads spin while they wait
    would take the cores from the other one.

    Args:
        command: that starts the driver.
        load: what it is to load: the fields of its ``Settings``.
        environment: variables on top of this process's own, of which those that tune OpenMP are left out:
            what suits one engine may halve the speed of another.
        log: where what it prints goes.
        watch_memory: sample it from the start; costs some of the speed.

    Raises:
        EngineError: it failed to load; names the log.
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
                start_new_session=True,  # its own children end with it
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
        """Of the driver, which leads a session of its own."""
        return self._process.pid

    def generate(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """One run: ``tokens``, ``first``, ``num_first`` and ``seconds``.

        Raises:
            EngineError: it failed, or made fewer tokens than it was asked for.
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
        """Since the process was started."""
        return perf_counter() - self._started

    def peak_bytes(self) -> int:
        """The most memory that it and its children held at once, no file standing behind it."""
        assert self._memory is not None, "asked for at the start"
        return self._memory.stop()

    def close(self) -> None:
        """Ends the process and all that it has started."""
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
            said = "\n".join(self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
            raise EngineError(f"the engine ended with {code}; the end of {self.log}:\n{said}")
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)
