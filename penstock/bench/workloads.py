"""`Bench`: benchmarks of a model in this process, such as decoding, prefill, batches and start-up.

Each figure is the median of several runs after one warm-up run. Each run has new prompts. The machine should
be idle.
"""

from __future__ import annotations

import json
import pickle
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Self, TypeVar

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
    "decode": "one prompt: tokens per second after the first token",
    "prefill": "one prompt: prompt tokens per second",
    "batch": "several concurrent prompts: output tokens per second over the whole run",
    "start": "a new process, with its files in the page cache: seconds from its start to the first token",
    "memory": "a new process: peak of its anonymous memory (without mapped files) until it has generated a"
    " token and packed all weights",
    "step": "one decode step; Python: the step time minus the time of the step's compiled kernels, or, if the"
    " step is not compiled, the step time of a tiny model with the same number and types of layers",
}
"""Name -> description of the measurement."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The lengths in tokens, the number of prompts of a batch, and the number of runs of each workload."""

    prompt_length: int = 128
    prefill_length: int = 1024
    new_tokens: int = 64
    batch: int = 32
    repeats: int = 5


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a workload."""

    workload: str
    quantity: str
    """The measured quantity, such as a phase of the start-up."""
    unit: str
    runs: list[float]
    """One value for each run, in order."""

    @property
    def median(self) -> float:
        """The median of the runs."""
        return statistics.median(self.runs)

    def as_dict(self) -> dict[str, object]:
        """Return the figure as data for JSON."""
        median_and_bounds = {"median": self.median, "lowest": min(self.runs), "highest": max(self.runs)}
        return {
            "work": self.workload,
            "of": self.quantity,
            "unit": self.unit,
            **median_and_bounds,
            "runs": self.runs,
        }


class _TimedRunner(BatchRunner):
    """A `BatchRunner` that records when the last call of `run` returned its first tokens."""

    first_token_time: float = 0.0
    """The time of the first tokens, in seconds of `perf_counter`."""
    num_first_tokens: int = 0
    """The number of tokens in the first outputs. A scheduler call can generate several tokens per prompt."""

    def run(self, builders: Sequence[BuilderT], *, seconds: float) -> Iterator[list[BuilderT]]:
        self.num_first_tokens = 0
        for returned_builders in super().run(builders, seconds=seconds):
            if not self.num_first_tokens:
                self.first_token_time = perf_counter()
                counts = [
                    builder.num_new_tokens
                    for builder in returned_builders
                    if isinstance(builder, OutputBuilder)
                ]
                self.num_first_tokens = sum(counts)
            yield returned_builders


class InstrumentedLLM(LLM):
    """An `LLM` that records when its last call returned its first tokens."""

    _runner_class = _TimedRunner
    _runner: _TimedRunner

    @property
    def first_token_time(self) -> float:
        """The time of the first tokens, in seconds of `perf_counter`."""
        return self._runner.first_token_time

    @property
    def num_first_tokens(self) -> int:
        """The number of tokens in the first outputs."""
        return self._runner.num_first_tokens


class Bench:
    """Runs workloads with one loaded model.

    Args:
        config: the configuration of the model. The prefix cache is disabled.
        sizes: the sizes of the workloads.

    Raises:
        PenstockError: the model cannot be loaded.
    """

    def __init__(self, config: PipelineConfig, sizes: Sizes) -> None:
        self.config = replace(config, kv_cache=replace(config.kv_cache, enable_prefix_caching=False))
        self.sizes = sizes
        self._random = np.random.default_rng(0)
        self._llm = InstrumentedLLM.from_config(self.config)
        self._llm.pipeline.pack_all_pending()
        self._graph_status = "decoding was not measured"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._llm.close()

    @property
    def kernels(self) -> str:
        """The kernels of the model."""
        return str(self._llm.pipeline.session.kernels)

    @property
    def graph_status(self) -> str:
        """How decode steps ran, such as ``eager`` with the reason, or that decoding was not measured."""
        return self._graph_status

    def check(self, workload_names: Sequence[str]) -> None:
        """Check that the workloads do not exceed the model's maximum length.

        Raises:
            ConfigError: a workload exceeds the maximum length. The message contains the workload and both
                lengths.
        """
        sizes, max_length = self.sizes, self._llm.pipeline.memory_plan.max_length
        num_tokens = {
            "decode": sizes.prompt_length + sizes.new_tokens,
            "batch": sizes.prompt_length + sizes.new_tokens,
            "prefill": sizes.prefill_length + 1,
            "step": sizes.prompt_length + sizes.new_tokens,
        }
        for workload in workload_names:
            if num_tokens.get(workload, 0) > max_length:
                raise ConfigError(
                    workload,
                    f"needs {num_tokens[workload]} tokens, but the maximum length is {max_length}: "
                    "choose shorter lengths",
                )

    def measure(self, workload: str) -> list[Figure]:
        """Run one of `WORKLOADS` and return its figures."""
        workloads: dict[str, Callable[[], list[Figure]]] = {
            "decode": self._decode,
            "prefill": self._prefill,
            "batch": self._batch,
            "start": self._start,
            "memory": self._memory,
            "step": self._step,
        }
        return workloads[workload]()

    def speed(self, workload: str) -> float:
        """Return the tokens per second of one run of ``decode`` or ``prefill``.

        A caller can measure several models alternately with this method.
        """
        if workload == "decode":
            return 1 / self._step_seconds(self._llm)
        length = self.sizes.prefill_length
        return length / self._time_generation(self._llm, 1, length, 1)

    def _decode(self) -> list[Figure]:
        seconds = self._repeat(lambda: self._step_seconds(self._llm))
        return [Figure("decode", "1 prompt", "tokens/s", [1 / value for value in seconds])]

    def _prefill(self) -> list[Figure]:
        length = self.sizes.prefill_length
        seconds = self._repeat(lambda: self._time_generation(self._llm, 1, length, 1))
        return [Figure("prefill", f"{length} tokens", "tokens/s", [length / value for value in seconds])]

    def _batch(self) -> list[Figure]:
        sizes = self.sizes
        seconds = self._repeat(
            lambda: self._time_generation(self._llm, sizes.batch, sizes.prompt_length, sizes.new_tokens)
        )
        tokens = sizes.batch * sizes.new_tokens
        return [Figure("batch", f"{sizes.batch} prompts", "tokens/s", [tokens / value for value in seconds])]

    def _start(self) -> list[Figure]:
        phases = [start.phase_seconds for start in self._cold_starts]
        return [Figure("start", name, "s", [phase[name] for phase in phases]) for name in phases[0]]

    def _memory(self) -> list[Figure]:
        return [Figure("memory", "peak", "MB", [start.peak_memory / 1e6 for start in self._cold_starts])]

    @cached_property
    def _cold_starts(self) -> list[ColdStart]:
        """The measured starts of new processes. The workloads ``start`` and ``memory`` share them."""
        return self._repeat(lambda: cold_start(self.config))

    def _step(self) -> list[Figure]:
        step_times = self._repeat(lambda: self._step_seconds(self._llm))
        return [
            Figure("step", "all", "ms", [1000 * value for value in step_times]),
            Figure("step", "Python", "ms", [1000 * value for value in self._python_seconds(step_times)]),
        ]

    def _python_seconds(self, step_times: list[float]) -> list[float]:
        graphs = self._llm.pipeline.session.graphs
        if graphs is not None and graphs.last_graph is not None:
            kernels = kernel_seconds(graphs.last_graph)
            return [max(value - kernels, 1e-9) for value in step_times]
        with TemporaryDirectory(prefix="penstock-") as folder:
            length = self.sizes.prompt_length + self.sizes.new_tokens
            config_values = self.config.model.huggingface_config.to_dict()
            narrow_values = narrow_config(config_values, max_length=length)
            narrow_values["dtype"] = self._llm.pipeline.model.dtype.value
            write_random_checkpoint(Path(folder), narrow_values)
            model_config = self.config.model
            model = ModelConfig(model_path=folder, devices=model_config.devices, kernels=model_config.kernels)
            config = replace(self.config, model=model, speculative=SpeculativeConfig())
            with InstrumentedLLM.from_config(config) as llm:
                llm.pipeline.pack_all_pending()
                return self._repeat(lambda: self._step_seconds(llm))

    def _repeat(self, run: Callable[[], T]) -> list[T]:
        run()
        return [run() for _ in range(self.sizes.repeats)]

    def _step_seconds(self, llm: InstrumentedLLM) -> float:
        """Return the mean seconds of a decode step of one context, without the steps of the first output."""
        count, prompts = self.sizes.new_tokens, self._random_prompts(llm, 1, self.sizes.prompt_length)
        total_seconds = _generation_seconds(llm, prompts, count)
        seconds_after_first = perf_counter() - llm.first_token_time
        if llm is self._llm:
            self._graph_status = llm.pipeline.session.graph_status
        if llm.num_first_tokens < count:
            return seconds_after_first / (count - llm.num_first_tokens)
        # All tokens were returned at once. A second run measures the time to the first token.
        return max(total_seconds - _generation_seconds(llm, prompts, 1), 1e-9) / (count - 1)

    def _time_generation(self, llm: LLM, count: int, length: int, new_tokens: int) -> float:
        return _generation_seconds(llm, self._random_prompts(llm, count, length), new_tokens)

    def _random_prompts(self, llm: LLM, count: int, length: int) -> list[list[int]]:
        tokens = self._random.integers(0, llm.tokenizer.vocab_size, (count, length))
        return [[int(token) for token in row] for row in tokens]


@dataclass(frozen=True, slots=True)
class ColdStart:
    """The start-up of a new process, until its first token."""

    phase_seconds: dict[str, float]
    """Phase -> seconds; ``all`` is the total."""
    peak_memory: int
    """The peak of the anonymous memory in bytes, sampled up to 50 times per second; 0 if the system does not
    report it.
    """


def cold_start(config: PipelineConfig) -> ColdStart:
    """Start a new process that loads a model and generates a token. Return its timings.

    Raises:
        PenstockError: the process failed. The message has the last line of the process's standard error.
    """
    with TemporaryFile() as stdin, TemporaryFile() as stdout, TemporaryFile() as stderr:
        stdin.write(pickle.dumps(config))
        stdin.seek(0)
        start, peak_memory = perf_counter(), 0
        command = [sys.executable, "-m", "penstock.bench.cold_start"]
        with subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr) as child:
            while child.poll() is None:
                peak_memory = max(peak_memory, _anonymous_memory(child.pid))
                sleep(0.02)
        stdout.seek(0), stderr.seek(0)
        if child.returncode:
            lines = stderr.read().decode(errors="replace").strip().splitlines() or ["it wrote no message"]
            raise PenstockError(f"a new process failed: {lines[-1]}")
        phases: dict[str, float] = json.loads(stdout.read())
    end = phases.pop("end_time")
    seconds = {
        "imports": phases["start_time"] - start + phases["import_seconds"],
        "model": phases["load_seconds"],
        "first token": phases["first_token_seconds"],
        "all": end - start,
    }
    return ColdStart(seconds, peak_memory)


def _anonymous_memory(pid: int) -> int:
    """Return the resident anonymous memory of a process, in bytes; 0 if the system does not report it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def kernel_seconds(graph: Graph, num_runs: int = 50) -> float:
    """Return the seconds of the kernels of a compiled step: the median of runs with its last inputs.

    ``graph`` must be the last step that ran, because each run writes the same values to the KV cache again.
    """
    durations = []
    for _ in range(num_runs):
        start = perf_counter()
        graph.run()
        durations.append(perf_counter() - start)
    return statistics.median(durations)


def _generation_seconds(llm: LLM, prompts: list[list[int]], new_tokens: int) -> float:
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, detokenize=False)
    start = perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return perf_counter() - start
