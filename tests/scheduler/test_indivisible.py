"""All tokens of an image with bidirectional attention are computed in one step."""

from __future__ import annotations

import numpy as np
import pytest
from support.fake_pipeline import FakePipeline, expected_output_tokens
from support.images import image_context
from support.kv_contexts import kv_manager

from penstock.pipelines.core import TextAndVisionContext
from penstock.scheduler import Scheduler

IMAGE_TOKEN = 99


def make_context(name: str, *lengths: int, seed: int = 0) -> TextAndVisionContext:
    """Return a context with three text tokens before, between and after images of these lengths."""
    tokens = [1, 2, 3]
    for length in lengths:
        tokens += [IMAGE_TOKEN] * length + [4, 5, 6]
    pixels = [np.full(2, seed + index) for index in range(len(lengths))]
    return image_context(tokens, pixels, IMAGE_TOKEN, 5, has_bidirectional_images=True, request_id=name)


def run_contexts(
    *contexts: TextAndVisionContext, budget: int, num_blocks: int = 200, min_chunk_size: int = 4
) -> FakePipeline:
    """Run the contexts. Check their outputs and that no step starts or ends within an image."""
    expected = {context.request_id: expected_output_tokens(context) for context in contexts}
    spans = {
        context.request_id: [(image.start_idx, image.end_idx) for image in context.images]
        for context in contexts
    }
    pipeline = FakePipeline(kv_manager(num_blocks))
    scheduler = Scheduler(
        pipeline, max_batch_size=4, max_batch_input_tokens=budget, min_chunk_size=min_chunk_size
    )
    for context in contexts:
        scheduler.submit(context)
    tokens: dict[str, list[int]] = {name: [] for name in expected}
    for _ in range(400):
        for name, output in scheduler.step().items():
            tokens[name] += [int(response.next_token) for response in output.tokens]
        if not scheduler.has_work:
            break
    assert tokens == expected
    for rows, starts in zip(pipeline.trace, pipeline.starts, strict=True):
        for name, count in rows.items():
            for index in (starts[name], starts[name] + count):
                assert not any(start < index < end for start, end in spans[name])
    return pipeline


@pytest.mark.parametrize("budget", [4, 7, 10, 16, 40])
def test_no_step_starts_or_ends_within_an_image(budget: int) -> None:
    pipeline = run_contexts(make_context("a", 6, 5, 6), budget=budget)
    assert sum(rows["a"] for rows in pipeline.trace) >= 29


def test_an_image_larger_than_the_budget_is_the_only_prompt_of_its_step() -> None:
    pipeline = run_contexts(
        make_context("a", 12), make_context("b", 12, seed=5), make_context("c", 2), budget=8
    )
    image_steps = [rows for rows in pipeline.trace if max(rows.values()) >= 12]
    assert len(image_steps) == 2
    assert all(sum(count > 1 for count in rows.values()) == 1 for rows in image_steps)


def test_an_image_above_the_budget_runs_with_a_long_request() -> None:
    long_context = make_context("a", 2)
    long_context.max_length = 200
    run_contexts(long_context, make_context("b", 12), budget=8)


def test_requests_with_images_run_in_a_cache_that_is_too_small_for_all() -> None:
    contexts = [make_context(str(index), 6, 7, seed=3 * index) for index in range(4)]
    run_contexts(*contexts, budget=12, num_blocks=10)


def test_a_cached_prefix_that_ends_within_an_image_is_shortened() -> None:
    first_context = make_context("a", 6)
    second_context = make_context("b", 6)
    pipeline = FakePipeline(kv_manager(50))
    scheduler = Scheduler(pipeline, max_batch_size=4, max_batch_input_tokens=40)
    for context in (first_context, second_context):
        scheduler.submit(context)
        while scheduler.has_work:
            scheduler.step()
    # Blocks have 4 tokens. Index 8 is within the image [3, 9), so the cached prefix cannot have 8 tokens.
    assert second_context.num_cached_tokens == 0
    truncated_context = make_context("c", 6)
    truncated_context.set_token_indices(active_idx=11, end_idx=11)
    assert (
        pipeline.kv._prefixes.num_usable_blocks(
            truncated_context, pipeline.kv._prefixes.chain(truncated_context), 2
        )
        == 0
    )
