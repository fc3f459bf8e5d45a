"""`measure_steps`: measures the step times that a simulation uses."""

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
"""Numbers of tokens of the measured prompts."""
CHUNKS = (16, 64, 256, 512)
"""Numbers of tokens of the measured last chunks of a prompt. The first chunk has the maximum size."""
BATCHES = (1, 2, 4, 8, 16, 32)
"""Numbers of contexts of the measured decode steps."""
CONTEXTS = (16, 512)
"""Prompt lengths of the contexts in the measured decode steps."""


def measure_steps(config: PipelineConfig, *, repeats: int = 5) -> tuple[StepCostTable, WorkerLimits]:
    """Load a model, measure its steps, and return the fitted step times and the limits of its memory plan.

    A step is a call of `Scheduler.step`: scheduling, forward and sampling. Each shape runs once for warm-up.
    Its time is the median of ``repeats`` runs.

    Args:
        config: the configuration of a text model. Its prefix cache is disabled.
        repeats: number of runs of each shape.

    Raises:
        PenstockError: the model cannot be loaded.
        ConfigError: the maximum length of the model is too short.
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
        min_length = max(CONTEXTS) + 2 * repeats
        if plan.max_length < min_length:
            raise ConfigError(
                "max_length", f"must be at least {min_length} to measure, was {plan.max_length}"
            )
        while pipeline.prepare_next():
            pass
        scheduler = load_scheduler(config, pipeline)
        vocabulary = config.model.huggingface_config.vocabulary_size
        steps = [*_measure_prompts(scheduler, limits, vocabulary, repeats)]
        steps += _measure_last_chunks(scheduler, limits, vocabulary, repeats)
        steps += _measure_decode_steps(scheduler, limits, vocabulary, repeats)
    finally:
        pipeline.close()
    return StepCostTable.fitted(steps), limits


def _measure_prompts(
    scheduler: AnyScheduler, limits: WorkerLimits, vocabulary: int, repeats: int
) -> Iterator[tuple[StepShape, float]]:
    """Yield shape and seconds of a step with one prompt, for each length in `PROMPTS` within the limits."""
    for length in PROMPTS:
        if length > min(limits.max_batch_input_tokens, limits.max_length - 1):
            return
        runs = []
        for _ in range(repeats + 1):
            (context,) = _submit(scheduler, 1, length, 1, vocabulary)
            shape = StepShape.from_contexts([context])
            runs.append(_time_step(scheduler))
        yield shape, statistics.median(runs[1:])


def _measure_last_chunks(
    scheduler: AnyScheduler, limits: WorkerLimits, vocabulary: int, repeats: int
) -> Iterator[tuple[StepShape, float]]:
    """Yield shape and seconds of a prompt's last chunk, for each length in `CHUNKS` within the limits."""
    first = limits.max_batch_input_tokens
    for length in CHUNKS:
        if length > first or first + length > limits.max_length - 1:
            return
        runs = []
        for _ in range(repeats + 1):
            (context,) = _submit(scheduler, 1, first + length, 1, vocabulary)
            while context.start_idx < first:
                scheduler.step()
            shape = StepShape.from_contexts([context])
            runs.append(_time_step(scheduler))
        yield shape, statistics.median(runs[1:])


def _measure_decode_steps(
    scheduler: AnyScheduler, limits: WorkerLimits, vocabulary: int, repeats: int
) -> Iterator[tuple[StepShape, float]]:
    """Yield shape and seconds of a decode step, for each length in `CONTEXTS` and each batch in `BATCHES`.

    Batches that exceed the limits are omitted.
    """
    for length in CONTEXTS:
        blocks = -(-(length + 2 * repeats) // limits.block_size)
        for count in BATCHES:
            if count > limits.max_batch_size or count * (blocks + 1) > limits.num_blocks:
                continue
            contexts = _submit(scheduler, count, length, 2 * repeats, vocabulary)
            while any(not len(context.generated_tokens) for context in contexts):
                scheduler.step()
            _time_step(scheduler)
            shape = StepShape.from_contexts(contexts)
            runs = [_time_step(scheduler) for _ in range(repeats)]
            for context in contexts:
                scheduler.cancel(context.request_id)
            scheduler.step()
            yield shape, statistics.median(runs)


def _submit(
    scheduler: AnyScheduler, count: int, length: int, num_new_tokens: int, vocabulary: int
) -> Sequence[TextContext]:
    """Submit greedy requests with random prompts, and return their contexts."""
    generator = np.random.default_rng(length)
    contexts = [
        TextContext(
            prompt="",
            max_length=length + num_new_tokens,
            tokens=generator.integers(0, vocabulary, length),
            ignore_eos=True,
            sampling_params=SamplingParams(temperature=0.0),
            request_id=uuid4().hex,
        )
        for _ in range(count)
    ]
    for context in contexts:
        scheduler.submit(context)
    return contexts


def _time_step(scheduler: AnyScheduler) -> float:
    """Return the seconds of a step."""
    start = perf_counter()
    scheduler.step()
    return perf_counter() - start
