"""The request loop of a driver process: one JSON object per line, until standard input ends.

Requests and answers:

    {"do": "load", "model": folder or file, "encoding": ..., "threads": 2, "max_length": 1100, "prompts": 1}
        -> {"versions": {...}}
    {"do": "generate", "prompts": [[3, 17, ...], ...], "new_tokens": 64}
        -> {"tokens": [[...], ...], "first": seconds, "num_first": 1, "seconds": seconds}

``first`` is the time of the first output of the first prompt, ``num_first`` its number of tokens, and
``seconds`` the time until all prompts are complete. Descriptor 1 is redirected to standard error before the
engine is imported, so that the engine's prints do not mix with the answers.
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

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG: the signal that the kernel sends when the parent ends
Tokens = list[list[int]]
Generate = Callable[[Tokens, int, Callable[[int], None]], Tokens]
"""(prompts, number of new tokens, callback with the number of tokens of an output) -> new tokens."""


@dataclass(frozen=True)
class Settings:
    """The settings of an engine."""

    model: Path
    """The folder of a checkpoint, or the file or folder that the engine's conversion tool wrote."""
    encoding: str
    """The engine's name of the encoding."""
    threads: int
    max_length: int
    """Maximum number of tokens of a prompt with its answer."""
    prompts: int
    """Number of concurrent prompts."""


def answer_requests(open_engine: Callable[[Settings], Generate]) -> None:
    """Answer the requests of standard input until it ends. ``open_engine`` loads the engine."""
    # The driver must not survive its parent.
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
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
            assert generate is not None, "the first request is load"
            answer = timed(generate, request["prompts"], request["new_tokens"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def timed(generate: Generate, prompts: Tokens, new_tokens: int) -> dict[str, Any]:
    """Run the engine once and return the tokens and times."""
    arrivals: list[tuple[float, int]] = []
    start = perf_counter()
    tokens = generate(prompts, new_tokens, lambda count: arrivals.append((perf_counter(), count)))
    end = perf_counter()
    first, num_first = (arrivals or [(end, new_tokens)])[0]
    return {"tokens": tokens, "first": first - start, "num_first": num_first, "seconds": end - start}


def versions() -> dict[str, str]:
    """Return the versions of Python and of all installed packages. Package names have hyphens."""
    found = {one.name.lower().replace("_", "-"): one.version for one in importlib.metadata.distributions()}
    return {"python": platform.python_version(), **dict(sorted(found.items()))}
