"""Measure the times of steps that a simulation uses."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from uuid import uuid4

import numpy as np

from penstock.assembly import load_pipeline, load_scheduler, load_tokenizer
from penstock.bench.simulation.costs import StepCostTable, StepShape, WorkerLimits
from penstock.config import PipelineConfig
from penstock.errors import ConfigError
from penstock.pipelines.core import SamplingParams, TextContext
from penstock.scheduler import AnyScheduler

PROMPTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Tokens of the measured prompts."""
CHUNKS = (16, 64, 256, 512)
"""Tokens of the last part of a prompt, after a first part that fills a step."""
BATCHES = (1, 2, 4, 8, 16, 32)
"""Contexts of the measured decode steps."""
CONTEXTS = (16, 512)
"""Cached tokens of each of these contexts."""


def measure_steps(config: PipelineConfig, *, repeats: int = 5) -> tuple[StepCostTable, WorkerLimits]:
    """Load a model and return the fitted times of its steps, and its limits.

    A step is a call of `Scheduler.step`: scheduling, forward and sampling. Each shape runs once before it is
    measured; its time is the median.

    Args:
        config: the configuration of a text model. Its prefix cache is not used.
        repeats: measurements of each shape.

    Raises:
        PenstockError: the model cannot be loaded.
        ConfigError: its maximum length is too short.
    """
    tokenizer = load_tokenizer(config)
    config = replace(config, kv_cache=replace(config.kv_cache, enable_prefix_caching=False))
    pipeline = load_pipeline(config, tokenizer)
    try:
        plan = pipeline.memory_plan
        limits = WorkerLimits(
            plan.max_length,
            plan.max_batch_size,
            plan.max_batch_input_tokens,
            pipeline.kv.num_blocks,
            plan.block_size,
        )
        needed = max(CONTEXTS) + 2 * repeats
        if plan.max_length < needed:
            raise ConfigError("max_length", f"must be at least {needed} to measure, was {plan.max_length}")
        while pipeline.pack_pending():
            pass
        scheduler = load_scheduler(config, pipeline)
        vocabulary = config.model.huggingface_config.vocabulary_size
        steps = [*_prompts(scheduler, limits, vocabulary, repeats)]
        steps += _last_parts(scheduler, limits, vocabulary, repeats)
        steps += _decoding(scheduler, limits, vocabulary, repeats)
    finally:
        pipeline.close()
    return StepCostTable.fitted(steps), limits


def _prompts(
    scheduler: AnyScheduler, limits: WorkerLimits, vocabulary: int, repeats: int
) -> Iterator[tuple[StepShape, float]]:
    """Yield shape and seconds of a step with one prompt, for each length."""
    for length in PROMPTS:
        if length > min(limits.max_batch_input_tokens, limits.max_length - 1):
            return
        runs = []
        for _ in range(repeats + 1):
            (context,) = _submit(scheduler, 1, length, 1, vocabulary)
            shape = StepShape.of([context])
            runs.append(_timed_step(scheduler))
        yield shape, statistics.median(runs[1:])


def _last_parts(
    scheduler: AnyScheduler, limits: WorkerLimits, vocabulary: int, repeats: int
) -> Iterator[tuple[StepShape, float]]:
    """Yield shape and seconds of the second step of prompts that do not fit into one step."""
    first = limits.max_batch_input_tokens
    for length in CHUNKS:
        if length > first or first + length > limits.max_length - 1:
            return
        runs = []
        for _ in range(repeats + 1):
            (context,) = _submit(scheduler, 1, first + length, 1, vocabulary)
            while context.start_idx < first:
                scheduler.step()
            shape = StepShape.of([context])
            runs.append(_timed_step(scheduler))
        yield shape, statistics.median(runs[1:])


def _decoding(
    scheduler: AnyScheduler, limits: WorkerLimits, vocabulary: int, repeats: int
) -> Iterator[tuple[StepShape, float]]:
    """Yield shape and seconds of a decode step, for each batch and length of contexts."""
    for length in CONTEXTS:
        blocks = -(-(length + 2 * repeats) // limits.block_size)
        for count in BATCHES:
            if count > limits.max_batch_size or count * (blocks + 1) > limits.num_blocks:
                continue
            contexts = _submit(scheduler, count, length, 2 * repeats, vocabulary)
            while any(not len(context.generated_tokens) for context in contexts):
                scheduler.step()
            _timed_step(scheduler)
            shape = StepShape.of(contexts)
            runs = [_timed_step(scheduler) for _ in range(repeats)]
            for context in contexts:
                scheduler.cancel(context.request_id)
            scheduler.step()
            yield shape, statistics.median(runs)


def _submit(
    scheduler: AnyScheduler, count: int, length: int, num_new_tokens: int, vocabulary: int
) -> Sequence[TextContext]:
    """Submit greedy requests with random prompts."""
    draws = np.random.default_rng(length)
    contexts = [
        TextContext(
            prompt="",
            max_length=length + num_new_tokens,
            tokens=draws.integers(0, vocabulary, length),
            ignore_eos=True,
            sampling_params=SamplingParams(temperature=0.0),
            request_id=uuid4().hex,
        )
        for _ in range(count)
    ]
    for context in contexts:
        scheduler.submit(context)
    return contexts


def _timed_step(scheduler: AnyScheduler) -> float:
    """Return the seconds of a step."""
    begin = perf_counter()
    scheduler.step()
    return perf_counter() - begin
