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

PROMPT_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Numbers of tokens of the measured prompts."""
CHUNK_LENGTHS = (16, 64, 256, 512)
"""Numbers of tokens of the measured last chunks of a prompt. The first chunk has the maximum size."""
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
"""Numbers of contexts of the measured decode steps."""
CONTEXT_LENGTHS = (16, 512)
"""Prompt lengths of the contexts in the measured decode steps."""


def measure_steps(config: PipelineConfig, *, repeats: int = 5) -> tuple[StepCostTable, WorkerLimits]:
    """Load a model, measure its steps, and return the fitted step times and the limits of its memory plan.

    A step is a call of `Scheduler.step`: scheduling, forward and sampling. Each step shape runs once for
    warm-up. The time of a shape is the median of ``repeats`` runs.

    Args:
        config: the configuration of a text model. Its prefix cache is disabled.
        repeats: number of measured runs of each shape.

    Raises:
        PenstockError: the model cannot be loaded.
        ConfigError: the maximum length of the model is too short.
    """
    tokenizer = load_tokenizer(config)
    config = replace(config, kv_cache=replace(config.kv_cache, enable_prefix_caching=False))
    pipeline = load_pipeline(config, tokenizer)
    try:
        plan = pipeline.memory_plan
        worker_limits = WorkerLimits(
            plan.max_length,
            plan.max_batch_size,
            plan.max_batch_input_tokens,
            pipeline.kv.num_blocks,
            plan.block_size,
        )
        min_length = max(CONTEXT_LENGTHS) + 2 * repeats
        if plan.max_length < min_length:
            raise ConfigError(
                "max_length", f"must be at least {min_length} to measure, was {plan.max_length}"
            )
        while pipeline.prepare_next():
            pass
        scheduler = load_scheduler(config, pipeline)
        vocab_size = config.model.huggingface_config.vocabulary_size
        steps = [*_measure_prompts(scheduler, worker_limits, vocab_size, repeats)]
        steps += _measure_last_chunks(scheduler, worker_limits, vocab_size, repeats)
        steps += _measure_decode_steps(scheduler, worker_limits, vocab_size, repeats)
    finally:
        pipeline.close()
    return StepCostTable.fitted(steps), worker_limits


def _measure_prompts(
    scheduler: AnyScheduler, limits: WorkerLimits, vocab_size: int, repeats: int
) -> Iterator[tuple[StepShape, float]]:
    """Yield shape and seconds of a step with one prompt, for each of `PROMPT_LENGTHS` within the limits."""
    for length in PROMPT_LENGTHS:
        if length > min(limits.max_batch_input_tokens, limits.max_length - 1):
            return
        seconds = []
        for _ in range(repeats + 1):
            (context,) = _submit(scheduler, 1, length, 1, vocab_size)
            shape = StepShape.from_contexts([context])
            seconds.append(_time_step(scheduler))
        yield shape, statistics.median(seconds[1:])


def _measure_last_chunks(
    scheduler: AnyScheduler, limits: WorkerLimits, vocab_size: int, repeats: int
) -> Iterator[tuple[StepShape, float]]:
    """Yield shape and seconds of a prompt's last chunk, for each of `CHUNK_LENGTHS` within the limits."""
    first_chunk_length = limits.max_batch_input_tokens
    for length in CHUNK_LENGTHS:
        if length > first_chunk_length or first_chunk_length + length > limits.max_length - 1:
            return
        seconds = []
        for _ in range(repeats + 1):
            (context,) = _submit(scheduler, 1, first_chunk_length + length, 1, vocab_size)
            while context.start_idx < first_chunk_length:
                scheduler.step()
            shape = StepShape.from_contexts([context])
            seconds.append(_time_step(scheduler))
        yield shape, statistics.median(seconds[1:])


def _measure_decode_steps(
    scheduler: AnyScheduler, limits: WorkerLimits, vocab_size: int, repeats: int
) -> Iterator[tuple[StepShape, float]]:
    """Yield shape and seconds of a decode step, for each of `CONTEXT_LENGTHS` and each of `BATCH_SIZES`.

    Batches that exceed the limits are omitted.
    """
    for length in CONTEXT_LENGTHS:
        num_context_blocks = -(-(length + 2 * repeats) // limits.block_size)
        for batch_size in BATCH_SIZES:
            num_blocks = batch_size * (num_context_blocks + 1)
            if batch_size > limits.max_batch_size or num_blocks > limits.num_blocks:
                continue
            contexts = _submit(scheduler, batch_size, length, 2 * repeats, vocab_size)
            while any(not len(context.generated_tokens) for context in contexts):
                scheduler.step()
            _time_step(scheduler)
            shape = StepShape.from_contexts(contexts)
            seconds = [_time_step(scheduler) for _ in range(repeats)]
            for context in contexts:
                scheduler.cancel(context.request_id)
            scheduler.step()
            yield shape, statistics.median(seconds)


def _submit(
    scheduler: AnyScheduler, num_requests: int, prompt_length: int, num_new_tokens: int, vocab_size: int
) -> Sequence[TextContext]:
    """Submit greedy requests with random prompts, and return their contexts."""
    generator = np.random.default_rng(prompt_length)
    contexts = [
        TextContext(
            prompt="",
            max_length=prompt_length + num_new_tokens,
            tokens=generator.integers(0, vocab_size, prompt_length),
            ignore_eos=True,
            sampling_params=SamplingParams(temperature=0.0),
            request_id=uuid4().hex,
        )
        for _ in range(num_requests)
    ]
    for context in contexts:
        scheduler.submit(context)
    return contexts


def _time_step(scheduler: AnyScheduler) -> float:
    """Return the seconds of a step."""
    start = perf_counter()
    scheduler.step()
    return perf_counter() - start
