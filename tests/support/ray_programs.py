"""Programs that start a Ray cluster, access to the cluster's processes, and requests to its servers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

ROOT = Path(__file__).resolve().parents[2]
_MARKER = "TEST_RAY_MARK"

PROMPTS = [f"Once upon a time there were {n} small dogs" for n in range(32)]
NUM_TOKENS = 900


class RayProgram:
    """A program that starts Ray on this machine.

    All processes of the program inherit an environment variable that identifies these processes.

    Args:
        arguments: the arguments of Python.
        folder: an existing folder for the output and the files of Ray.
    """

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self._marker = uuid4().hex
        self._log = folder / f"log-{self._marker[:6]}"
        environment = {
            **os.environ,
            _MARKER: self._marker,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "PYTHONPATH": str(ROOT),
        }
        environment["RAY_ADDRESS"] = "local"  # never connect to the cluster of another program
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *arguments], stdout=log, stderr=log, env=environment, cwd=folder
            )

    @property
    def output(self) -> str:
        """The output of the program and its actors."""
        return self._log.read_text(errors="replace")

    def pids(self, *words: str) -> list[int]:
        """Return the ids of the cluster's processes whose command line contains all words."""
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes()
                command = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            is_ours = f"{_MARKER}={self._marker}".encode() in environment
            if is_ours and all(word in command for word in words):
                pids.append(int(folder.name))
        return sorted(pids)

    def wait(self, seconds: float = 100) -> int:
        """Wait for the program to end and return its exit status."""
        return self.process.wait(seconds)

    def close(self) -> None:
        """End the program and all processes of its cluster."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for pid in self.pids():
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)


@contextmanager
def ray_program(arguments: list[str], folder: Path) -> Iterator[RayProgram]:
    """Run a program for the duration of a block. Print its output if the block fails."""
    program = RayProgram(arguments, folder)
    try:
        yield program
    except BaseException:
        print(program.output[-8000:])
        raise
    finally:
        program.close()


def wait_until(condition: object, seconds: float = 60) -> None:
    """Wait until a function returns a true value. Fail after ``seconds``."""
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.05)


# -- Requests to a server ----------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def post(port: int, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=100) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def completion_body(prompt: str, **further_fields: Any) -> dict[str, Any]:
    fields = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return {"model": "demo", "prompt": prompt, **fields, **further_fields}


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError:
        return False
