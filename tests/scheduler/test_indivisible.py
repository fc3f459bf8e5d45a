"""Images whose tokens attend to each other in both directions are computed in one step."""

from __future__ import annotations

import numpy as np
import pytest
from support.fake_pipeline import FakePipeline, alone
from support.images import image_context
from support.paged import kv_manager

from penstock.pipelines.core import TextAndVisionContext
from penstock.scheduler import Scheduler

IMAGE = 99


def context_of(name: str, *lengths: int, seed: int = 0) -> TextAndVisionContext:
    """A prompt of three text tokens, an image, three text tokens, and so on."""
    tokens = [1, 2, 3]
    for length in lengths:
        tokens += [IMAGE] * length + [4, 5, 6]
    pixels = [np.full(2, seed + index) for index in range(len(lengths))]
    return image_context(tokens, pixels, IMAGE, 5, has_bidirectional_images=True, request_id=name)


def run(
    *contexts: TextAndVisionContext, budget: int, num_blocks: int = 200, min_chunk: int = 4
) -> FakePipeline:
    """Run the contexts and check their outputs, and that no step ends within an image."""
    expected = {one.request_id: alone(one) for one in contexts}
    spans = {one.request_id: [(i.start_idx, i.end_idx) for i in one.images] for one in contexts}
    pipeline = FakePipeline(kv_manager(num_blocks))
    scheduler = Scheduler(pipeline, max_batch_size=4, max_batch_input_tokens=budget, min_chunk_size=min_chunk)
    for one in contexts:
        scheduler.submit(one)
    found: dict[str, list[int]] = {name: [] for name in expected}
    for _ in range(400):
        for name, output in scheduler.step().items():
            found[name] += [int(part.next_token) for part in output.tokens]
        if not scheduler.has_work:
            break
    assert found == expected
    for rows, starts in zip(pipeline.trace, pipeline.starts, strict=True):
        for name, count in rows.items():
            for index in (starts[name], starts[name] + count):
                assert not any(first < index < end for first, end in spans[name])
    return pipeline


@pytest.mark.parametrize("budget", [4, 7, 10, 16, 40])
def test_a_step_ends_before_or_after_an_image(budget: int) -> None:
    pipeline = run(context_of("a", 6, 5, 6), budget=budget)
    assert sum(rows["a"] for rows in pipeline.trace) >= 29


def test_an_image_larger_than_the_budget_is_the_only_prompt_of_its_step() -> None:
    pipeline = run(context_of("a", 12), context_of("b", 12, seed=5), context_of("c", 2), budget=8)
    large = [rows for rows in pipeline.trace if max(rows.values()) >= 12]
    assert len(large) == 2
    assert all(sum(count > 1 for count in rows.values()) == 1 for rows in large)


def test_an_image_waits_for_no_running_request() -> None:
    long = context_of("a", 2)
    long.max_length = 200
    run(long, context_of("b", 12), budget=8)


def test_preempted_images() -> None:
    contexts = [context_of(str(index), 6, 7, seed=3 * index) for index in range(4)]
    run(*contexts, budget=12, num_blocks=10)


def test_a_prefix_that_ends_within_an_image_is_shortened() -> None:
    first = context_of("a", 6)
    second = context_of("b", 6)
    second.tokens[12] = 7  # another token after the image: the common prefix has 12 tokens
    pipeline = FakePipeline(kv_manager(50))
    scheduler = Scheduler(pipeline, max_batch_size=4, max_batch_input_tokens=40)
    for one in (first, second):
        scheduler.submit(one)
        while scheduler.has_work:
            scheduler.step()
    # Blocks of 4 tokens: 8 is within the image [3, 9), so the hit ends at 12 or before the image.
    assert second.num_cached_tokens in (0, 12)
    short = context_of("c", 6)
    short.set_token_indices(active_idx=11, end_idx=11)
    assert pipeline.kv._prefixes.usable_hit(short, pipeline.kv._prefixes.chain(short), 2) == 0
