"""The child's side: an engine that answers requests, a JSON object a line, until its input ends.

Requests and answers, in the order of their lines:

    {"do": "load", "model": folder or file, "encoding": ..., "threads": 2, "max_length": 1100, "prompts": 1}
        -> {"versions": {...}}
    {"do": "generate", "prompts": [[3, 17, ...], ...], "new_tokens": 64}
        -> {"tokens": [[...], ...], "first": seconds, "num_first": 1, "seconds": seconds}

``first`` is when the first tokens of the first prompt were there, ``num_first`` how many they were, and
``seconds`` when all of all prompts were. An engine prints what it likes: descriptor 1 is standard error
before it is imported, and the answers have one of their own.
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

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG: the signal that comes when the parent ends
Tokens = list[list[int]]
Generate = Callable[[Tokens, int, Callable[[int], None]], Tokens]
"""Prompts, the number of new tokens, and whom to tell how many of a prompt have just come -> new tokens."""


@dataclass(frozen=True)
class Settings:
    """What an engine is opened with."""

    model: Path
    """The folder of a checkpoint, or whatever else the engine's conversion made of it."""
    encoding: str
    """As the engine calls it."""
    threads: int
    max_length: int
    """Of the longest prompt with its answer, in tokens."""
    prompts: int
    """How many are served at once."""


def answer_requests(open_engine: Callable[[Settings], Generate]) -> None:
    """Serves standard input to its end; ``open_engine`` loads what the first request names."""
    # No engine goes on alone where its reader was killed.
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
    """One run, with the clock beside it."""
    arrivals: list[tuple[float, int]] = []
    start = perf_counter()
    tokens = generate(prompts, new_tokens, lambda count: arrivals.append((perf_counter(), count)))
    end = perf_counter()
    first, num_first = (arrivals or [(end, new_tokens)])[0]
    return {"tokens": tokens, "first": first - start, "num_first": num_first, "seconds": end - start}


def versions() -> dict[str, str]:
    """Of Python and of all packages beside it, whose names are spelled with hyphens."""
    found = {one.name.lower().replace("_", "-"): one.version for one in importlib.metadata.distributions()}
    return {"python": platform.python_version(), **dict(sorted(found.items()))}
