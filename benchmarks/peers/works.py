"""The workloads: sizes, prompts, runs and the figures of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from benchmarks.peers.engines import Engine

Opener = Callable[[bool], AbstractContextManager[Engine]]
"""Starts an engine and loads its model. The argument is ``watch_memory``."""


@dataclass(frozen=True)
class Result:
    """One run of one engine."""

    figures: Mapping[str, float]
    """Name of the figure -> its value."""
    tokens: list[int]
    """The answer to the first prompt. It shows whether two engines compute the same tokens."""


@dataclass(frozen=True)
class Work:
    """A workload: the number of concurrent prompts, their length, and the number of new tokens per prompt."""

    name: str
    what: str
    unit: str
    prompts: int
    length: int
    new: int
    is_fresh: bool = False
    """Each run starts a new process."""
    less_is_better: bool = False

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a prompt with its answer."""
        return self.length + self.new


WORKLOADS: Mapping[str, Work] = {
    work.name: work
    for work in [
        Work("decode", "one prompt: tokens/s after the first token", "tokens/s", 1, 128, 64),
        Work("prefill", "one prompt: prompt tokens/s, until the first new token", "tokens/s", 1, 1024, 1),
        Work("batch", "several prompts at once: output tokens/s over the whole run", "tokens/s", 32, 256, 64),
        Work("long", "decode tokens/s at a long context and at 128 tokens, and their ratio", "", 1, 4096, 64),
        Work("cold", "process start to the first token, files in the page cache", "s", 1, 128, 1, True, True),
        Work("memory", "peak anonymous memory of loading, decode and prefill", "MB", 1, 1024, 64, True, True),
    ]
}
_SHORT = WORKLOADS["decode"].length


def sized(work: Work, *, batch: int, context: int) -> Work:
    """Return the workload with ``batch`` prompts (batch) or ``context`` prompt tokens (long)."""
    changes = {"batch": {"prompts": batch}, "long": {"length": context}}
    return replace(work, **changes.get(work.name, {}))


def prompts_of(work: Work, vocabulary: int, random: Random, length: int | None = None) -> list[list[int]]:
    """Return new prompts of random tokens."""
    size = work.length if length is None else length
    return [[random.randrange(3, vocabulary) for _ in range(size)] for _ in range(work.prompts)]


def run(work: Work, engine: Engine, prompts: list[list[int]]) -> Result:
    """Run a workload once on a loaded engine."""
    if work.name == "long":
        return _run_long(work, engine, prompts)
    answer = engine.generate(prompts, work.new)
    figure = {
        "decode": lambda: _decoding_speed(work, answer),
        "prefill": lambda: work.length / answer["first"],
        "batch": lambda: work.prompts * work.new / answer["seconds"],
    }[work.name]()
    return Result({f"of {work.prompts}" if work.name == "batch" else "": figure}, answer["tokens"][0])


def run_fresh(work: Work, opener: Opener, prompts: list[list[int]]) -> Result:
    """Run a workload once, starting a new process."""
    with opener(work.name == "memory") as engine:
        if work.name == "cold":
            tokens = engine.generate(prompts, work.new)["tokens"][0]
            return Result({"": engine.seconds_since_start()}, tokens)
        engine.generate([prompts[0][:_SHORT]], work.new)
        tokens = engine.generate(prompts, work.new)["tokens"][0]
        return Result({"": engine.peak_bytes() / 1e6}, tokens)


def _decoding_speed(work: Work, answer: Mapping[str, Any]) -> float:
    """Return tokens/s after the first output. An engine may return several tokens in its first output."""
    return float((work.new - answer["num_first"]) / (answer["seconds"] - answer["first"]))


def _run_long(work: Work, engine: Engine, prompts: list[list[int]]) -> Result:
    speeds = {}
    for length in (work.length, _SHORT):  # Penstock and the peer alternate: ends with the short run of both
        answer = engine.generate([prompts[0][:length]], work.new)
        speeds[length] = _decoding_speed(work, answer)
    short, long = speeds[_SHORT], speeds[work.length]
    figures = {f"at {_SHORT}": short, f"at {work.length}": long, "share": long / short}
    return Result(figures, answer["tokens"][0])


def max_length_of(works: Sequence[Work]) -> int:
    """Return the longest length of all workloads, rounded up to a multiple of 64."""
    return -(-max(work.max_length for work in works) // 64) * 64
