"""Runs one of the compared inference engines in a child process of the benchmark."""

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

from benchmarks.peers.processes import PeakMemory, end_session

ROOT = Path(__file__).parents[2]
_NUM_LOG_LINES = 30  # lines of a failed engine's log in the error message
_OPENMP_PREFIXES = ("OMP_", "GOMP_", "KMP_")


class EngineError(Exception):
    """The process of an engine ended, or its answer is invalid."""


def _inherited_environment() -> dict[str, str]:
    """Return the environment variables of this process, without the settings of OpenMP."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OPENMP_PREFIXES)}


class Engine:
    """An engine whose driver runs as a child process in a virtual environment.

    Used as a context manager, the engine ends the process at the end of the block.

    Between two requests, SIGSTOP suspends the process and its children. Otherwise the threads of an idle
    engine could spin and take CPU time from the other engine.

    Args:
        command: the command that starts the driver.
        load: the content of the load request, with the fields of `drivers.request_loop.Settings`.
        environment: environment variables of the driver, added to the variables of this process. The driver
            does not inherit settings of OpenMP, because a setting that suits one engine can halve the speed
            of another engine.
        log: the file for the output of the driver and the engine.
        watch_memory: whether to sample the memory of the process and its children 50 times per second.
            Sampling takes CPU time.

    Raises:
        EngineError: the engine ended during the load. The message names the log.
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
        self._start_time = perf_counter()
        with log.open("w") as log_file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                cwd=ROOT,
                env={**_inherited_environment(), "PYTHONPATH": str(ROOT), **environment},
                start_new_session=True,  # so that killpg also reaches the children of the driver
            )
        self._memory = PeakMemory(self._process.pid) if watch_memory else None
        try:
            self.versions: dict[str, str] = self._send({"do": "load", **load})["versions"]
        except BaseException:
            self.close()
            raise
        self.seconds_to_load = perf_counter() - self._start_time

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def process_id(self) -> int:
        """Process id of the driver. The driver is the leader of a new session."""
        return self._process.pid

    def generate(self, prompts: list[list[int]], num_new_tokens: int) -> dict[str, Any]:
        """Generate ``num_new_tokens`` tokens for each prompt.

        Returns the answer that `drivers.request_loop` describes: ``tokens``, ``first_output_seconds``,
        ``num_first_tokens`` and ``total_seconds``.

        Raises:
            EngineError: the engine failed, or did not return ``num_new_tokens`` tokens for each prompt.
        """
        answer = self._send({"do": "generate", "prompts": prompts, "num_new_tokens": num_new_tokens})
        lengths = {len(tokens) for tokens in answer["tokens"]}
        if len(answer["tokens"]) != len(prompts) or lengths != {num_new_tokens}:
            raise EngineError(
                f"expected {len(prompts)} answers of {num_new_tokens} tokens, got "
                f"{len(answer['tokens'])} answers of {sorted(lengths)} tokens; see {self.log}"
            )
        return answer

    def seconds_since_start(self) -> float:
        """Return the seconds since the process was started."""
        return perf_counter() - self._start_time

    def peak_bytes(self) -> int:
        """Stop sampling and return the peak anonymous and shared memory of the process and its children."""
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
        end_session(self._process)

    def _send(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the driver and return its answer."""
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
            last_lines = "\n".join(self.log.read_text(errors="replace").splitlines()[-_NUM_LOG_LINES:])
            raise EngineError(
                f"the engine ended with exit status {code}; the last lines of {self.log}:\n{last_lines}"
            )
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)
