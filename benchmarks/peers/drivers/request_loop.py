"""The request loop of a driver: reads one JSON object per line until standard input ends, and answers each.

Requests and answers:

    {"do": "load", "model": folder or file, "encoding": ..., "num_threads": 2, "max_length": 1100,
     "num_prompts": 1}
        -> {"versions": {...}}
    {"do": "generate", "prompts": [[3, 17, ...], ...], "num_new_tokens": 64}
        -> {"tokens": [[...], ...], "first_output_seconds": 0.1, "num_first_tokens": 1, "total_seconds": 2.5}

``first_output_seconds`` is the time until the first output that the driver reports, ``num_first_tokens`` the
number of tokens in the first output, and ``total_seconds`` the time until all answers are complete. If the
driver reports no output, ``first_output_seconds`` equals ``total_seconds`` and ``num_first_tokens`` equals
``num_new_tokens``. File descriptor 1 is redirected to standard error before the engine loads, because lines
that the engine prints must not mix with the answers.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

_PR_SET_PDEATHSIG = 1  # option of prctl: the kernel sends a signal to this process when its parent ends
Tokens = list[list[int]]
Generate = Callable[[Tokens, int, Callable[[int], None]], Tokens]
"""(prompts, number of new tokens, callback) -> new tokens of each prompt.

The driver calls the callback at the first output, with the number of tokens of this output. The time of this
call is the time to first token. Later calls have no effect."""


@dataclass(frozen=True)
class Settings:
    """The settings of an engine, from the load request."""

    model: Path
    """The folder of a checkpoint, or the file or folder of the converted model."""
    encoding: str
    """The weight encoding, by the engine's name."""
    num_threads: int
    max_length: int
    """Maximum number of tokens of a prompt and its answer."""
    num_prompts: int
    """Number of concurrent prompts."""


def answer_requests(open_engine: Callable[[Settings], Generate]) -> None:
    """Answer the requests of standard input until it ends.

    Args:
        open_engine: loads the engine and returns the function that generates.
    """
    # The driver must end if the benchmark is killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    generate: Generate | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if request.pop("do") == "load":
            model = Path(request.pop("model"))
            generate = open_engine(Settings(model=model, **request))
            answer: dict[str, Any] = {"versions": versions()}
        else:
            assert generate is not None, "the first request must be load"
            answer = generate_timed(generate, request["prompts"], request["num_new_tokens"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def generate_timed(generate: Generate, prompts: Tokens, num_new_tokens: int) -> dict[str, Any]:
    """Run the engine once and return the answer to the request."""
    arrivals: list[tuple[float, int]] = []
    start = perf_counter()
    tokens = generate(prompts, num_new_tokens, lambda count: arrivals.append((perf_counter(), count)))
    end = perf_counter()
    first_output_time, num_first_tokens = (arrivals or [(end, num_new_tokens)])[0]
    return {
        "tokens": tokens,
        "first_output_seconds": first_output_time - start,
        "num_first_tokens": num_first_tokens,
        "total_seconds": end - start,
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of all installed packages. Names are in lower case with hyphens."""
    packages = importlib.metadata.distributions()
    package_versions = {package.name.lower().replace("_", "-"): package.version for package in packages}
    return {"python": platform.python_version(), **dict(sorted(package_versions.items()))}
