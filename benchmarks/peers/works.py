"""What the engines are made to do: sizes, prompts, and what comes of a run as figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from benchmarks.peers.engines import Engine

Opener = Callable[[bool], AbstractContextManager[Engine]]
"""Starts an engine and loads its model; True: with an eye on its memory."""


@dataclass(frozen=True)
class Result:
    """One run of one engine."""

    figures: Mapping[str, float]
    """What of the work -> its figure."""
    tokens: list[int]
    """The first prompt's answer, to see whether two engines compute the same."""


@dataclass(frozen=True)
class Work:
    """So many prompts of a length at once, and how many tokens each is to gain."""

    name: str
    what: str
    unit: str
    prompts: int
    length: int
    new: int
    is_fresh: bool = False
    """Each run starts a process of its own."""
    less_is_better: bool = False

    @property
    def max_length(self) -> int:
        """Of a prompt with its answer."""
        return self.length + self.new


WORKLOADS: Mapping[str, Work] = {
    work.name: work
    for work in [
        Work("decode", "one prompt: tokens/s after the first", "tokens/s", 1, 128, 64),
        Work("prefill", "one prompt: its tokens/s, to the first new one", "tokens/s", 1, 1024, 1),
        Work("batch", "several prompts at once: output tokens/s over the whole run", "tokens/s", 32, 256, 64),
        Work("long", "decode at a long context, at 128 tokens, and what share is left", "", 1, 4096, 64),
        Work("cold", "process start to the first token, files read before", "s", 1, 128, 1, True, True),
        Work("memory", "peak of anonymous memory: loading, decode, prefill", "MB", 1, 1024, 64, True, True),
    ]
}
_SHORT = WORKLOADS["decode"].length


def sized(work: Work, *, batch: int, context: int) -> Work:
    """The work with another number of prompts, or tokens of context, where it is about them."""
    changes = {"batch": {"prompts": batch}, "long": {"length": context}}
    return replace(work, **changes.get(work.name, {}))


def prompts_of(work: Work, vocabulary: int, random: Random, length: int | None = None) -> list[list[int]]:
    """Fresh prompts of random tokens: no run has seen them before."""
    size = work.length if length is None else length
    return [[random.randrange(3, vocabulary) for _ in range(size)] for _ in range(work.prompts)]


def run(work: Work, engine: Engine, prompts: list[list[int]]) -> Result:
    """One run of a work on a loaded engine."""
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
    """One run of a work that begins with the start of the process."""
    with opener(work.name == "memory") as engine:
        if work.name == "cold":
            tokens = engine.generate(prompts, work.new)["tokens"][0]
            return Result({"": engine.seconds_since_start()}, tokens)
        engine.generate([prompts[0][:_SHORT]], work.new)
        tokens = engine.generate(prompts, work.new)["tokens"][0]
        return Result({"": engine.peak_bytes() / 1e6}, tokens)


def _decoding_speed(work: Work, answer: Mapping[str, Any]) -> float:
    """Tokens/s, of those that came after the first ones: an engine may hand out several at once."""
    return float((work.new - answer["num_first"]) / (answer["seconds"] - answer["first"]))


def _run_long(work: Work, engine: Engine, prompts: list[list[int]]) -> Result:
    speeds = {}
    for length in (work.length, _SHORT):  # in this order little time lies between the two that are compared
        answer = engine.generate([prompts[0][:length]], work.new)
        speeds[length] = _decoding_speed(work, answer)
    short, long = speeds[_SHORT], speeds[work.length]
    figures = {f"at {_SHORT}": short, f"at {work.length}": long, "share": long / short}
    return Result(figures, answer["tokens"][0])


def max_length_of(works: Sequence[Work]) -> int:
    """The longest text of all, in whole blocks of 64."""
    return -(-max(work.max_length for work in works) // 64) * 64
