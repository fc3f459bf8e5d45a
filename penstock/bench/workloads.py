"""What a model does in this process, measured: decoding, prefill, batches, start-up, Python's share.

Each figure is the median of several runs, after one that does not count, with prompts that no run before has
had. The machine should be idle.
"""

from __future__ import annotations

import json
import pickle
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from penstock.bench.random_weights import narrow_config, write_random_checkpoint
from penstock.config import ModelConfig, PipelineConfig, SpeculativeConfig
from penstock.errors import ConfigError, PenstockError
from penstock.llm.batch_runner import BatchRunner, BuilderT
from penstock.llm.llm import LLM
from penstock.llm.outputs import OutputBuilder
from penstock.pipelines.core import SamplingParams

if TYPE_CHECKING:
    from penstock.kernels import Graph

T = TypeVar("T")

WORKLOADS = {
    "decode": "one prompt: tokens a second after the first",
    "prefill": "one prompt: its tokens a second",
    "batch": "several prompts at once: output tokens a second over the whole run",
    "start": "a fresh process, its files read before: from its start to the first token",
    "memory": "of such a process: the most that it held at once, pages of files not counted",
    "step": "of decoding; Python's part is all but its kernels, timed again in one call; or, where a step has"
    " no plan, that of a model of the same layers with next to nothing in them",
}
"""Name -> what is measured."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is done in each work; tokens but for ``batch`` and ``repeats``."""

    prompt_length: int = 128
    prefill_length: int = 1024
    new_tokens: int = 64
    batch: int = 32
    repeats: int = 5


@dataclass(frozen=True, slots=True)
class Figure:
    """What one work gave."""

    work: str
    of: str
    """Which part of it, where it has several."""
    unit: str
    runs: list[float]
    """One value a run, in their order."""

    @property
    def median(self) -> float:
        """The figure."""
        return statistics.median(self.runs)

    def as_dict(self) -> dict[str, Any]:
        """The figure for ``json``."""
        spread = {"median": self.median, "lowest": min(self.runs), "highest": max(self.runs)}
        return {"work": self.work, "of": self.of, "unit": self.unit, **spread, "runs": self.runs}


class _TimedRunner(BatchRunner):
    """Records when the last call returned its first tokens."""

    first_time: float = 0.0
    """Seconds of `perf_counter`."""
    num_first_tokens: int = 0
    """The number of these tokens."""

    def run(self, builders: Sequence[BuilderT], *, seconds: float) -> Iterator[list[BuilderT]]:
        self.num_first_tokens = 0
        for served in super().run(builders, seconds=seconds):
            if not self.num_first_tokens:
                self.first_time = perf_counter()
                counts = [one.num_new_tokens for one in served if isinstance(one, OutputBuilder)]
                self.num_first_tokens = sum(counts)
            yield served


class InstrumentedLLM(LLM):
    """An `LLM` that records when its last call returned its first tokens."""

    _runner_class = _TimedRunner
    _runner: _TimedRunner

    @property
    def first_time(self) -> float:
        """Seconds of `perf_counter`."""
        return self._runner.first_time

    @property
    def num_first_tokens(self) -> int:
        """The number of these tokens."""
        return self._runner.num_first_tokens


class Bench:
    """One model, loaded once, and its works.

    Args:
        config: of the model; prompts are fresh in each run, so its prefix cache is switched off.
        sizes: how much is done.

    Raises:
        PenstockError: the model cannot be loaded, or the works do not fit its longest text.
    """

    def __init__(self, config: PipelineConfig, sizes: Sizes) -> None:
        self.config = replace(config, kv_cache=replace(config.kv_cache, enable_prefix_caching=False))
        self.sizes = sizes
        self._random = np.random.default_rng(0)
        self._llm = InstrumentedLLM.from_config(self.config)
        self._llm.pipeline.pack_all_pending()
        self._plan_status = "decoding was not measured"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._llm.close()

    @property
    def kernels(self) -> str:
        """What the model computes with."""
        return str(self._llm.pipeline.session.kernels)

    @property
    def plan_status(self) -> str:
        """Whether decoding ran as one call a step: ``planned``, or ``eager`` and why."""
        return self._plan_status

    def check(self, works: Sequence[str]) -> None:
        """Refuses works that the model cannot do.

        Raises:
            ConfigError: names the length that is too long.
        """
        sizes, most = self.sizes, self._llm.pipeline.memory_plan.max_length
        needed = {
            "decode": sizes.prompt_length + sizes.new_tokens,
            "batch": sizes.prompt_length + sizes.new_tokens,
            "prefill": sizes.prefill_length + 1,
            "step": sizes.prompt_length + sizes.new_tokens,
        }
        for work in works:
            if needed.get(work, 0) > most:
                raise ConfigError(
                    work, f"takes {needed[work]} tokens, but the longest text is {most}: ask for shorter ones"
                )

    def measure(self, work: str) -> list[Figure]:
        """The figures of one of `WORKLOADS`."""
        figures: dict[str, Callable[[], list[Figure]]] = {
            "decode": self._decode,
            "prefill": self._prefill,
            "batch": self._batch,
            "start": self._start,
            "memory": self._memory,
            "step": self._step,
        }
        return figures[work]()

    def _decode(self) -> list[Figure]:
        seconds = self._repeated(lambda: self._seconds_of_step(self._llm))
        return [Figure("decode", "1 prompt", "tokens/s", [1 / one for one in seconds])]

    def _prefill(self) -> list[Figure]:
        length = self.sizes.prefill_length
        seconds = self._repeated(lambda: self._timed(self._llm, 1, length, 1))
        return [Figure("prefill", f"{length} tokens", "tokens/s", [length / one for one in seconds])]

    def _batch(self) -> list[Figure]:
        sizes = self.sizes
        seconds = self._repeated(
            lambda: self._timed(self._llm, sizes.batch, sizes.prompt_length, sizes.new_tokens)
        )
        tokens = sizes.batch * sizes.new_tokens
        return [Figure("batch", f"{sizes.batch} prompts", "tokens/s", [tokens / one for one in seconds])]

    def _start(self) -> list[Figure]:
        phases = self._repeated(lambda: cold_start(self.config).seconds)
        return [Figure("start", name, "s", [one[name] for one in phases]) for name in phases[0]]

    def _memory(self) -> list[Figure]:
        peaks = self._repeated(lambda: cold_start(self.config).peak_memory)
        return [Figure("memory", "peak", "MB", [peak / 1e6 for peak in peaks])]

    def _step(self) -> list[Figure]:
        whole = self._repeated(lambda: self._seconds_of_step(self._llm))
        return [
            Figure("step", "all", "ms", [1000 * one for one in whole]),
            Figure("step", "Python", "ms", [1000 * one for one in self._python_of_step(whole)]),
        ]

    def _python_of_step(self, whole: list[float]) -> list[float]:
        plans = self._llm.pipeline.session.plans
        if plans is not None and plans.last is not None:
            kernels = seconds_of_kernels(plans.last)
            return [max(one - kernels, 1e-9) for one in whole]
        with TemporaryDirectory(prefix="penstock-") as folder:
            length = self.sizes.prompt_length + self.sizes.new_tokens
            whole_config = self.config.model.huggingface_config.to_dict()
            narrow = narrow_config(whole_config, max_length=length)
            narrow["dtype"] = self._llm.pipeline.model.dtype.value
            write_random_checkpoint(Path(folder), narrow)
            given = self.config.model
            model = ModelConfig(model_path=folder, devices=given.devices, kernels=given.kernels)
            config = replace(self.config, model=model, speculative=SpeculativeConfig())
            with InstrumentedLLM.from_config(config) as llm:
                llm.pipeline.pack_all_pending()
                return self._repeated(lambda: self._seconds_of_step(llm))

    def _repeated(self, run: Callable[[], T]) -> list[T]:
        run()
        return [run() for _ in range(self.sizes.repeats)]

    def _seconds_of_step(self, llm: InstrumentedLLM) -> float:
        """Of one token of one context, after those that the first step brought."""
        count, prompts = self.sizes.new_tokens, self._prompts(llm, 1, self.sizes.prompt_length)
        whole = _seconds(llm, prompts, count)
        later = perf_counter() - llm.first_time
        if llm is self._llm:
            self._plan_status = llm.pipeline.session.plan_status
        if llm.num_first_tokens < count:
            return later / (count - llm.num_first_tokens)
        return max(whole - _seconds(llm, prompts, 1), 1e-9) / (count - 1)  # all have come at once

    def _timed(self, llm: LLM, count: int, length: int, new_tokens: int) -> float:
        return _seconds(llm, self._prompts(llm, count, length), new_tokens)

    def _prompts(self, llm: LLM, count: int, length: int) -> list[list[int]]:
        tokens = self._random.integers(0, llm.tokenizer.vocab_size, (count, length))
        return [[int(token) for token in row] for row in tokens]


@dataclass(frozen=True, slots=True)
class ColdStart:
    """A fresh process from its start to its first token."""

    seconds: dict[str, float]
    """What they were for, and all of them."""
    peak_memory: int
    """The most bytes it held that are no file's, of those seen 50 times a second; 0 where the system does not
    tell."""


def cold_start(config: PipelineConfig) -> ColdStart:
    """Starts a fresh process that loads a model and generates a token.

    Raises:
        PenstockError: the process failed; says with what.
    """
    with TemporaryFile() as given, TemporaryFile() as said, TemporaryFile() as complaints:
        given.write(pickle.dumps(config))
        given.seek(0)
        started, peak = perf_counter(), 0
        command = [sys.executable, "-m", "penstock.bench.cold_start"]
        with subprocess.Popen(command, stdin=given, stdout=said, stderr=complaints) as child:
            while child.poll() is None:
                peak = max(peak, _anonymous_memory(child.pid))
                sleep(0.02)
        said.seek(0), complaints.seek(0)
        if child.returncode:
            lines = complaints.read().decode(errors="replace").strip().splitlines() or ["nothing was said"]
            raise PenstockError(f"a fresh process failed: {lines[-1]}")
        phases: dict[str, float] = json.loads(said.read())
    ended = phases.pop("ended")
    seconds = {
        "imports": phases["began"] - started + phases["imports"],
        "model": phases["model"],
        "first token": phases["first"],
        "all": ended - started,
    }
    return ColdStart(seconds, peak)


def _anonymous_memory(pid: int) -> int:
    """Bytes of a process that are in memory and of no file."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def seconds_of_kernels(graph: Graph, runs: int = 50) -> float:
    """What the kernels of a step take when nothing comes between: the median of runs on its last inputs.

    They write once more to the KV cache what the step wrote there, so no other step may have run since.
    """
    taken = []
    for _ in range(runs):
        start = perf_counter()
        graph.run()
        taken.append(perf_counter() - start)
    return statistics.median(taken)


def _seconds(llm: LLM, prompts: list[list[int]], new_tokens: int) -> float:
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, detokenize=False)
    start = perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return perf_counter() - start
