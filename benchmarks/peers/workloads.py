"""The workloads of a comparison: their sizes, prompts, runs and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from benchmarks.peers.engines import Engine

Opener = Callable[[bool], AbstractContextManager[Engine]]
"""Starts an engine, which loads its model. The argument is ``watch_memory`` of `Engine`."""


@dataclass(frozen=True)
class Result:
    """The result of one run of one engine."""

    figures: Mapping[str, float]
    """Name of the figure -> its value."""
    tokens: list[int]
    """The generated tokens of the first prompt.

    Reports count how often both engines agree on the first token.
    """


@dataclass(frozen=True)
class Workload:
    """A workload: the number of concurrent prompts, their length, and the number of new tokens per prompt."""

    name: str
    description: str
    """The figure that the workload measures."""
    unit: str
    """The unit of the figure; empty if the workload has several figures."""
    num_prompts: int
    prompt_length: int
    num_new_tokens: int
    starts_process: bool = False
    """Each run starts a new process."""
    less_is_better: bool = False

    @property
    def max_length(self) -> int:
        """Number of tokens of a prompt and its answer."""
        return self.prompt_length + self.num_new_tokens


WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in [
        Workload("decode", "one prompt: tokens/s after the first token", "tokens/s", 1, 128, 64),
        Workload("prefill", "one prompt: prompt tokens/s until the first new token", "tokens/s", 1, 1024, 1),
        Workload("batch", "concurrent prompts: output tokens/s of the whole run", "tokens/s", 32, 256, 64),
        Workload(
            "long", "decode tokens/s at a long context and at 128 tokens, and their ratio", "", 1, 4096, 64
        ),
        Workload("cold", "process start to first token, with a warm page cache", "s", 1, 128, 1, True, True),
        Workload(
            "memory", "peak anonymous and shared memory: load, decode, prefill", "MB", 1, 1024, 64, True, True
        ),
    ]
}
_SHORT_CONTEXT_LENGTH = WORKLOADS["decode"].prompt_length


def with_sizes(workload: Workload, *, batch: int, context: int) -> Workload:
    """Return the workload with another size.

    Args:
        workload: the workload. Only ``batch`` and ``long`` change.
        batch: the number of prompts of the workload ``batch``.
        context: the prompt length of the workload ``long``.
    """
    changes = {"batch": {"num_prompts": batch}, "long": {"prompt_length": context}}
    return replace(workload, **changes.get(workload.name, {}))


def random_prompts(
    workload: Workload, vocab_size: int, random: Random, length: int | None = None
) -> list[list[int]]:
    """Return new prompts of random tokens, with ``length`` tokens or the length of the workload."""
    size = workload.prompt_length if length is None else length
    return [[random.randrange(3, vocab_size) for _ in range(size)] for _ in range(workload.num_prompts)]


def run(workload: Workload, engine: Engine, prompts: list[list[int]]) -> Result:
    """Run a workload once on a loaded engine."""
    if workload.name == "long":
        return _run_long(workload, engine, prompts)
    answer = engine.generate(prompts, workload.num_new_tokens)
    figure = {
        "decode": lambda: _decoding_speed(workload, answer),
        "prefill": lambda: workload.prompt_length / answer["first_output_seconds"],
        "batch": lambda: workload.num_prompts * workload.num_new_tokens / answer["total_seconds"],
    }[workload.name]()
    name = f"of {workload.num_prompts}" if workload.name == "batch" else ""
    return Result({name: figure}, answer["tokens"][0])


def run_in_new_process(workload: Workload, opener: Opener, prompts: list[list[int]]) -> Result:
    """Run a workload once in a new process of the engine."""
    with opener(workload.name == "memory") as engine:
        if workload.name == "cold":
            tokens = engine.generate(prompts, workload.num_new_tokens)["tokens"][0]
            return Result({"": engine.seconds_since_start()}, tokens)
        engine.generate([prompts[0][:_SHORT_CONTEXT_LENGTH]], workload.num_new_tokens)
        tokens = engine.generate(prompts, workload.num_new_tokens)["tokens"][0]
        return Result({"": engine.peak_bytes() / 1e6}, tokens)


def _decoding_speed(workload: Workload, answer: Mapping[str, Any]) -> float:
    """Return tokens/s after the first output.

    The tokens of the first output, one or several, do not count.
    """
    return float(
        (workload.num_new_tokens - answer["num_first_tokens"])
        / (answer["total_seconds"] - answer["first_output_seconds"])
    )


def _run_long(workload: Workload, engine: Engine, prompts: list[list[int]]) -> Result:
    """Decode at a long context and at 128 tokens. Returns both speeds, and their ratio as ``share``."""
    speeds = {}
    for length in (workload.prompt_length, _SHORT_CONTEXT_LENGTH):
        answer = engine.generate([prompts[0][:length]], workload.num_new_tokens)
        speeds[length] = _decoding_speed(workload, answer)
    short, long = speeds[_SHORT_CONTEXT_LENGTH], speeds[workload.prompt_length]
    figures = {
        f"at {_SHORT_CONTEXT_LENGTH}": short,
        f"at {workload.prompt_length}": long,
        "share": long / short,
    }
    return Result(figures, answer["tokens"][0])


def largest_max_length(workloads: Sequence[Workload]) -> int:
    """Return the largest ``max_length`` of the workloads, rounded up to a multiple of 64."""
    return -(-max(workload.max_length for workload in workloads) // 64) * 64
