"""`Scheduler`: rows (computed tokens) of each request in each step, refusals, cancelling, failures."""

from __future__ import annotations

import gc
import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.fake_pipeline import FakePipeline, expected_output_tokens
from support.kv_contexts import kv_manager, text_context

from penstock.errors import (
    ConfigError,
    InputError,
    InsufficientBlocksError,
    PenstockError,
    RequestFailedError,
)
from penstock.kv_cache import NullKVCache
from penstock.pipelines.core import EmbeddingsResponse, TextContext, TextGenerationResponse
from penstock.scheduler import Scheduler

Trace = list[dict[str, int]]


class SchedulerRun:
    """A scheduler with a fake pipeline, and a record of the output tokens."""

    def __init__(
        self,
        *num_blocks: int,
        windows: tuple[int | None, ...] = (None,),
        caching: bool = True,
        key_limits: tuple[int, ...] = (),
        **options: Any,
    ) -> None:
        kv = kv_manager(
            *(num_blocks or (100,)), windows=windows, enable_prefix_caching=caching, key_limits=key_limits
        )
        self.pipeline = FakePipeline(kv)
        settings = {"max_batch_size": 4, "max_batch_input_tokens": 16, "min_chunk_size": 4}
        self.scheduler: Scheduler[TextContext, TextGenerationResponse] = Scheduler(
            self.pipeline, **(settings | options)
        )
        self.contexts: dict[str, TextContext] = {}
        self.expected: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}

    def submit(self, name: str, prompt: int | list[int], max_new_tokens: int, **fields: Any) -> TextContext:
        """Submit a request. If ``prompt`` is an int, the prompt has this number of tokens ``ord(name)``."""
        if isinstance(prompt, int):
            prompt = [ord(name)] * prompt
        context = text_context(prompt, max_length=len(prompt) + max_new_tokens, request_id=name, **fields)
        self.contexts[name], self.expected[name] = context, expected_output_tokens(context)
        self.scheduler.submit(context)
        self.tokens[name] = []
        return context

    def step(self, num_steps: int = 1) -> Trace:
        """Call ``Scheduler.step`` once. Return the number of rows of each request in each forward."""
        num_steps_before = len(self.pipeline.trace)
        for name, output in self.scheduler.step(num_steps).items():
            self.tokens[name] += [int(token.next_token) for token in output.tokens]
        return self.pipeline.trace[num_steps_before:]

    def finish(self, num_steps: int = 1) -> Trace:
        """Run until all requests have ended, and return the rows of each request in each forward.

        Check the outputs of requests that were not cancelled and did not fail, and that all blocks are free.
        """
        trace: Trace = []
        while self.scheduler.has_work:
            trace += self.step(num_steps)
            assert len(trace) < 1000
        for name, context in self.contexts.items():
            if context.is_done:
                assert self.tokens[name] == self.expected[name]
        assert self.kv.num_free_blocks == self.kv.num_blocks
        return trace

    @property
    def kv(self) -> Any:
        return self.pipeline.kv


# -- Continuous batching --------------------------------------------------------------------------------


def test_a_prompt_takes_one_step_and_each_further_token_takes_one_step() -> None:
    run = SchedulerRun()
    run.submit("a", 5, max_new_tokens=3)
    assert (run.scheduler.num_waiting, run.scheduler.num_running) == (1, 0)
    assert run.finish() == [{"a": 5}, {"a": 1}, {"a": 1}]
    assert run.pipeline.released == ["a"]
    assert not run.scheduler.failures


def test_requests_join_and_leave_between_steps() -> None:
    run = SchedulerRun()
    run.submit("a", 5, max_new_tokens=3)
    assert run.step() == [{"a": 5}]
    run.submit("b", 6, max_new_tokens=3)
    assert run.finish() == [{"a": 1, "b": 6}, {"a": 1, "b": 1}, {"b": 1}]


def test_a_request_ends_at_its_end_of_sequence() -> None:
    run = SchedulerRun()
    prompt = [1, 2, 3]
    third_token = expected_output_tokens(text_context(prompt, max_length=6))[2]
    run.submit("a", prompt, max_new_tokens=50, eos_token_ids={third_token})
    assert len(run.finish()) == 3
    assert len(run.tokens["a"]) == 2


def test_requests_are_admitted_in_order_of_arrival() -> None:
    run = SchedulerRun(max_batch_size=2)
    for name in "abc":
        run.submit(name, 3, max_new_tokens=2)
    assert run.finish() == [{"a": 3, "b": 3}, {"a": 1, "b": 1}, {"c": 3}, {"c": 1}]


def test_higher_priorities_are_admitted_first() -> None:
    run = SchedulerRun(max_batch_size=1)
    run.submit("a", 3, max_new_tokens=1)
    run.submit("b", 3, max_new_tokens=1, priority=1)
    run.submit("c", 3, max_new_tokens=1, priority=-1)
    run.submit("d", 3, max_new_tokens=1, priority=1)
    assert [list(rows) for rows in run.finish()] == [["b"], ["d"], ["a"], ["c"]]


# -- Chunks and the budget -------------------------------------------------------------------------------


def test_only_the_last_chunk_of_a_prompt_gives_an_output_token() -> None:
    run = SchedulerRun()
    run.submit("a", 36, max_new_tokens=2)
    assert run.finish() == [{"a": 16}, {"a": 16}, {"a": 4}, {"a": 1}]
    assert len(run.tokens["a"]) == 2


def test_decoding_continues_while_a_long_prompt_is_computed() -> None:
    run = SchedulerRun()
    run.submit("a", 3, max_new_tokens=5)
    run.step()
    run.submit("b", 40, max_new_tokens=1)
    assert run.finish() == [{"a": 1, "b": 15}, {"a": 1, "b": 15}, {"a": 1, "b": 10}, {"a": 1}]


def test_the_next_prompt_gets_the_remaining_budget_unless_it_is_below_the_minimum_chunk() -> None:
    run = SchedulerRun()
    run.submit("a", 10, max_new_tokens=1)
    run.submit("b", 10, max_new_tokens=1)
    run.submit("c", 14, max_new_tokens=1)
    # Step 1 has room for 6 tokens of b. Step 2 has the last 4 tokens of b and 12 tokens of c.
    assert run.finish() == [{"a": 10, "b": 6}, {"b": 4, "c": 12}, {"c": 2}]
    run = SchedulerRun(min_chunk_size=7)
    run.submit("a", 10, max_new_tokens=1)
    run.submit("b", 10, max_new_tokens=1)
    assert run.finish() == [{"a": 10}, {"b": 10}]


def test_an_unchunked_prompt_above_the_budget_runs_in_a_separate_step() -> None:
    run = SchedulerRun(whole_prompts=True)
    for name, length in (("a", 6), ("b", 40), ("c", 10), ("d", 7)):
        run.submit(name, length, max_new_tokens=1)
    assert run.finish() == [{"a": 6}, {"b": 40}, {"c": 10}, {"d": 7}]
    for name, length in (("e", 6), ("f", 10), ("g", 16), ("h", 17)):
        run.submit(name, length, max_new_tokens=1)
    assert run.finish() == [{"e": 6, "f": 10}, {"g": 16}, {"h": 17}]
    assert not run.scheduler.failures


def test_no_request_overtakes_a_prompt_whose_chunk_does_not_fit() -> None:
    run = SchedulerRun(min_chunk_size=7)
    for name, length in (("a", 12), ("b", 9), ("c", 2)):
        run.submit(name, length, max_new_tokens=1)
    assert run.finish() == [{"a": 12}, {"b": 9, "c": 2}]


def test_a_prompt_of_higher_priority_overtakes_a_running_prompt() -> None:
    run = SchedulerRun()
    run.submit("a", 40, max_new_tokens=1)
    run.step()
    run.submit("b", 20, max_new_tokens=1, priority=1)
    assert run.finish() == [{"b": 16}, {"b": 4, "a": 12}, {"a": 12}]


def test_a_prompt_progresses_in_each_step_of_a_full_batch() -> None:
    run = SchedulerRun(max_batch_size=4, max_batch_input_tokens=6, min_chunk_size=6)
    for name in "abc":
        run.submit(name, 2, max_new_tokens=8)
    run.step()
    run.submit("d", 9, max_new_tokens=1)
    assert [rows["d"] for rows in run.finish() if "d" in rows] == [3, 3, 3]


def test_an_unchunked_prompt_waits_until_it_fits() -> None:
    run = SchedulerRun(enable_chunked_prefill=False)
    run.submit("a", 3, max_new_tokens=3)
    run.step()
    run.submit("b", 16, max_new_tokens=1)
    run.submit("c", 2, max_new_tokens=1)
    assert run.finish() == [{"a": 1}, {"a": 1}, {"b": 16}, {"c": 2}]


def test_a_batch_is_no_larger_than_the_budget() -> None:
    run = SchedulerRun(max_batch_size=9, max_batch_input_tokens=3)
    for name in "abcd":
        run.submit(name, 1, max_new_tokens=2)
    assert run.finish() == [{"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}, {"d": 1}, {"d": 1}]


def test_forced_tokens_are_computed_with_the_next_token() -> None:
    run = SchedulerRun(max_batch_input_tokens=5)
    a = run.submit("a", 2, max_new_tokens=9)
    run.submit("b", 2, max_new_tokens=4)
    run.step()
    for token in range(5):
        a.jump_ahead(token)
    assert run.step() == [{"a": 4, "b": 1}]  # one row is reserved for b
    assert run.step() == [{"a": 2, "b": 1}]
    run.scheduler.cancel("a")
    run.finish()


@pytest.mark.parametrize("num_steps", [1, 3, 99])
def test_a_call_with_an_incomplete_prompt_runs_only_one_step(num_steps: int) -> None:
    run = SchedulerRun()
    run.submit("a", 3, max_new_tokens=8)
    run.submit("b", 20, max_new_tokens=9)  # runs as two chunks
    trace = run.finish(num_steps)
    assert trace[:2] == [{"a": 3, "b": 13}, {"a": 1, "b": 7}]
    assert [rows["a"] for rows in trace if "a" in rows] == [3, *[1] * 7]


def test_a_call_of_multiple_steps_ends_with_the_shortest_output() -> None:
    run = SchedulerRun()
    run.submit("a", 3, max_new_tokens=2)
    run.submit("b", 3, max_new_tokens=6)
    assert run.step(4) == [{"a": 3, "b": 3}, {"a": 1, "b": 1}]
    assert run.step(4) == [{"b": 1}] * 4


def test_a_call_of_multiple_steps_preempts_no_request() -> None:
    run = SchedulerRun(4)
    run.submit("a", 4, max_new_tokens=5)
    run.submit("b", 4, max_new_tokens=3)
    run.finish(4)
    assert run.scheduler.num_preemptions == 0


# -- Shared prefixes -------------------------------------------------------------------------------------


def test_a_cached_prefix_is_not_recomputed() -> None:
    run = SchedulerRun()
    prompt = list(range(1, 11))
    run.submit("a", prompt, max_new_tokens=1)
    run.finish()
    b = run.submit("b", [*prompt, 11, 12], max_new_tokens=1)
    assert run.finish() == [{"b": 4}]
    assert b.num_cached_tokens == 8


def test_equal_concurrent_prompts_compute_their_common_prefix_once() -> None:
    run = SchedulerRun()
    prompt = list(range(1, 25))
    for name in "abc":
        run.submit(name, prompt, max_new_tokens=2)
    run.submit("d", 3, max_new_tokens=2)  # d overtakes b and c, which wait for the prefix
    assert run.finish() == [
        {"a": 16},
        {"a": 8, "d": 3},
        {"a": 1, "d": 1, "b": 4, "c": 4},
        {"b": 1, "c": 1},
    ]


def test_a_request_stops_waiting_when_the_request_that_computes_its_prefix_ends() -> None:
    run = SchedulerRun()
    prompt = list(range(1, 25))
    run.submit("a", prompt, max_new_tokens=2)
    run.submit("b", prompt, max_new_tokens=2)
    assert run.step() == [{"a": 16}]
    run.scheduler.cancel("a")
    assert run.finish() == [{"b": 8}, {"b": 1}]


# -- Blocks: admission and preemption --------------------------------------------------------------------


def test_a_prompt_waits_until_its_blocks_are_free() -> None:
    run = SchedulerRun(6)
    run.submit("a", 12, max_new_tokens=3)
    run.submit("b", 12, max_new_tokens=1)  # three blocks are free, but one is reserved for a
    run.submit("c", 2, max_new_tokens=1)  # c would fit, but must not overtake b
    assert run.finish() == [{"a": 12}, {"a": 1}, {"a": 1}, {"b": 12, "c": 2}]
    assert run.scheduler.num_preemptions == 0


def test_the_youngest_request_is_preempted_and_its_output_does_not_change() -> None:
    run = SchedulerRun(5)
    run.submit("a", 4, max_new_tokens=12)
    run.submit("b", 4, max_new_tokens=12)
    trace = run.finish()
    assert trace[:5] == [{"a": 4, "b": 4}, *[{"a": 1, "b": 1}] * 4]
    # Both have two blocks. In step 6 both need a third block: a gets the last free block, and b is
    # preempted. The first block of b is still cached when a ends.
    assert trace[5:12] == [{"a": 1}] * 7
    assert trace[12][next(iter(trace[12]))] > 1
    assert run.scheduler.num_preemptions == 1
    assert run.tokens == run.expected


def test_the_request_of_the_lowest_priority_is_preempted_first() -> None:
    run = SchedulerRun(5)
    run.submit("a", 4, max_new_tokens=12, priority=-1)
    run.submit("b", 4, max_new_tokens=12)
    trace = run.finish()
    assert [list(rows) for rows in trace[5:12]] == [["b"]] * 7


def test_a_preempted_context_keeps_its_position_in_the_queue() -> None:
    run = SchedulerRun(5, max_batch_size=2)
    run.submit("a", 4, max_new_tokens=12)
    run.submit("b", 4, max_new_tokens=12)
    for _ in range(6):
        run.step()
    assert run.scheduler.num_preemptions == 1
    run.submit("c", 4, max_new_tokens=1)
    later_steps = run.finish()
    assert [list(rows) for rows in later_steps[:7]] == [["a"]] * 6 + [["b", "c"]]


def test_tokens_reused_after_a_preemption_do_not_count_as_cached() -> None:
    run = SchedulerRun(14, max_batch_input_tokens=2)
    run.submit("a", 4, max_new_tokens=30)
    run.submit("b", 40, max_new_tokens=1)  # b is preempted before its prompt is computed
    run.finish()
    assert run.scheduler.num_preemptions == 1
    starts = [starts["b"] for starts in run.pipeline.starts if "b" in starts]
    restart = next(start for previous_start, start in pairwise(starts) if start < previous_start)
    assert restart > 0
    assert run.contexts["b"].num_cached_tokens == 0


def test_a_prompt_that_lacks_blocks_waits_while_others_decode() -> None:
    ready_names = {"b"}
    run = SchedulerRun(9, max_batch_input_tokens=4, ready=lambda context: context.request_id in ready_names)
    run.submit("a", 24, max_new_tokens=1)
    run.submit("b", 4, max_new_tokens=12)
    trace = run.step() + run.step() + run.step()
    ready_names.add("a")  # a is older than b, and its prompt fits into the blocks that are free now
    trace += run.finish()
    assert [rows.get("b", 0) for rows in trace] == [4] + [1] * 11 + [0]
    assert [rows.get("a", 0) for rows in trace] == [0, 0, 0, 3, 3, 3, 3, 3, 3, 1, 1, 0, 4]
    assert run.scheduler.num_preemptions == 0


def test_all_tokens_of_a_preempted_context_are_computed_as_a_prompt() -> None:
    run = SchedulerRun(7, max_batch_input_tokens=4, caching=False)
    run.submit("a", 4, max_new_tokens=12)
    run.submit("b", 4, max_new_tokens=20)
    while not run.scheduler.num_preemptions:
        run.step()
    preempted = run.contexts["b"]
    assert (preempted.start_idx, preempted.end_idx, preempted.is_assigned_to_cache) == (0, 13, False)
    assert preempted.is_initial_prompt
    while run.step() != [{"b": 4}]:
        pass
    run.submit("c", 4, max_new_tokens=1, priority=1)
    assert run.finish()[:4] == [{"c": 4}, {"b": 4}, {"b": 4}, {"b": 1}]


def test_all_tokens_of_a_context_preempted_between_chunks_become_active() -> None:
    run = SchedulerRun(6, max_batch_size=2, max_batch_input_tokens=2, min_chunk_size=1, caching=False)
    preempted = run.submit("a", 6, max_new_tokens=1)
    run.step()
    run.submit("b", 14, max_new_tokens=8, priority=1)
    while not run.scheduler.num_preemptions:
        run.step()
    assert (preempted.start_idx, preempted.active_idx, preempted.end_idx) == (0, 6, 6)
    run.finish()


def test_all_tokens_of_a_context_beyond_its_key_limit_are_recomputed() -> None:
    run = SchedulerRun(key_limits=(7,), caching=False)
    run.submit("a", 5, max_new_tokens=6)
    assert run.finish() == [{"a": 5}, {"a": 1}, {"a": 1}, {"a": 8}, {"a": 1}, {"a": 1}]
    assert run.scheduler.num_preemptions == 0


@pytest.mark.parametrize("num_steps", [2, 3, 100])
def test_a_call_of_multiple_steps_ends_at_the_key_limit(num_steps: int) -> None:
    run = SchedulerRun(key_limits=(7,), caching=False)
    run.submit("a", 4, max_new_tokens=9)
    trace = run.finish(num_steps)
    assert [rows["a"] for rows in trace] == [4, 1, 1, 1, 8, 1, 1, 1, 1]


def test_recomputation_beyond_the_key_limit_is_chunked_while_others_decode() -> None:
    run = SchedulerRun(key_limits=(20,), caching=False, max_batch_input_tokens=8)
    run.submit("a", 20, max_new_tokens=4)
    run.submit("b", 3, max_new_tokens=9)
    assert run.finish() == [
        {"a": 8},
        {"a": 8},
        {"a": 4, "b": 3},
        *[{"b": 1, "a": 7}] * 3,
        *[{"a": 1, "b": 1}] * 2,
        *[{"b": 1}] * 3,
    ]


def test_a_context_that_ends_at_its_key_limit_is_not_recomputed() -> None:
    run = SchedulerRun(key_limits=(7,), caching=False)
    run.submit("a", 5, max_new_tokens=3)
    assert run.finish() == [{"a": 5}, {"a": 1}, {"a": 1}]


def test_requests_with_equal_prompts_share_the_recomputed_keys() -> None:
    run = SchedulerRun(key_limits=(13,), max_batch_input_tokens=64)
    for name in "abc":
        run.submit(name, [1] * 12, max_new_tokens=5)
    assert run.finish() == [
        {"a": 12},
        {"a": 1, "b": 4, "c": 4},
        {"b": 1, "c": 1, "a": 14},
        {"a": 1, "b": 2, "c": 2},
        {"a": 1, "b": 1, "c": 1},
        {"b": 1, "c": 1},
    ]


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 5)])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_steps", [1, 4])
def test_keys_before_a_key_limit_are_not_read_beyond_it(
    windows: tuple[int | None, ...], caching: bool, num_steps: int
) -> None:
    """Contexts with common prefixes cross two key limits. Few blocks cause preemptions and chunks."""
    run = SchedulerRun(*[14] * len(windows), windows=windows, caching=caching, key_limits=(9, 21))
    rng = np.random.default_rng(len(windows) + num_steps)
    for number in range(40):
        prompt = [1] * int(rng.integers(1, 12)) + [2] * int(rng.integers(1, 12))
        run.submit(f"{number:02}", prompt, max_new_tokens=int(rng.integers(1, 16)))
        for _ in range(int(rng.integers(0, 3))):
            run.step(num_steps)
    run.finish(num_steps)
    assert not run.scheduler.failures
    assert all(context.is_done for context in run.contexts.values())


def test_a_high_priority_request_without_blocks_does_not_stop_a_running_prompt() -> None:
    run = SchedulerRun(8, max_batch_input_tokens=8)
    run.submit("a", 24, max_new_tokens=1)
    run.step()
    run.submit("b", 24, max_new_tokens=1, priority=1)
    assert run.finish() == [{"a": 8}, {"a": 8}, {"b": 8}, {"b": 8}, {"b": 8}]


def test_chunks_shrink_to_the_free_blocks_of_a_window_group() -> None:
    run = SchedulerRun(50, 5, windows=(None, 6), min_chunk_size=2)
    run.submit("a", 30, max_new_tokens=3)
    trace = run.finish()
    assert trace[:4] == [{"a": 16}, {"a": 7}, {"a": 7}, {"a": 1}]


def test_several_long_prompts_run_with_few_blocks_of_a_window_group() -> None:
    run = SchedulerRun(50, 6, windows=(None, 6), min_chunk_size=2)
    for name in "abc":
        run.submit(name, 30, max_new_tokens=10)
    run.finish()
    assert run.tokens == run.expected


def test_a_prompt_fails_alone_if_blocks_are_reserved_outside_the_scheduler() -> None:
    run = SchedulerRun(6)
    unscheduled_context = text_context([9] * 15)
    run.kv.claim(unscheduled_context)
    run.kv.reserve(unscheduled_context)
    run.submit("a", 12, max_new_tokens=2)
    run.submit("b", 4, max_new_tokens=2)
    trace = []
    while run.scheduler.has_work:
        trace += run.step()
    assert trace == [{"a": 6}, {"b": 4}, {"b": 1}]
    assert list(run.scheduler.failures) == ["a"]
    error = run.scheduler.failures.pop("a")
    assert isinstance(error, InsufficientBlocksError)
    assert (error.needed, error.free, error.total) == (1, 0, 6)
    assert sorted(run.pipeline.released) == ["a", "b"]


def test_a_decoding_context_fails_if_blocks_are_reserved_outside_the_scheduler() -> None:
    run = SchedulerRun(3)
    run.submit("a", 4, max_new_tokens=6)
    run.step()
    unscheduled_context = text_context([9] * 8)
    run.kv.claim(unscheduled_context)
    run.kv.reserve(unscheduled_context)
    while run.scheduler.has_work:
        run.step()
    assert list(run.scheduler.failures) == ["a"]


# -- Refusals --------------------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused_with_its_token_and_block_counts() -> None:
    run = SchedulerRun(5)
    with pytest.raises(InputError, match=r"may take 21 tokens \(7 of them the prompt\).* 5 blocks"):
        run.submit("a", 7, max_new_tokens=14)
    run.submit("b", 7, max_new_tokens=13)
    run.finish()


def test_a_prompt_above_the_budget_is_refused_without_chunked_prefill() -> None:
    run = SchedulerRun(enable_chunked_prefill=False)
    with pytest.raises(InputError, match="has 17 tokens, but a step computes at most 16"):
        run.submit("a", 17, max_new_tokens=1)
    assert not run.scheduler.has_work


def test_a_preempted_context_above_the_budget_is_chunked_without_chunked_prefill() -> None:
    run = SchedulerRun(10, enable_chunked_prefill=False, max_batch_size=2)
    run.submit("a", 12, max_new_tokens=20)
    run.submit("b", 4, max_new_tokens=24)
    trace = run.finish()
    assert run.scheduler.num_preemptions > 0
    assert run.tokens == run.expected
    assert max(sum(rows.values()) for rows in trace) <= 16


def test_an_id_in_use_is_refused() -> None:
    run = SchedulerRun()
    run.submit("a", 3, max_new_tokens=2)
    for _ in range(2):
        with pytest.raises(InputError, match="request a is already submitted"):
            run.scheduler.submit(text_context([1], max_length=2, request_id="a"))
        run.step()  # the request is waiting in the first iteration and running in the second
    assert not run.scheduler.has_work
    run.scheduler.submit(text_context([1], max_length=2, request_id="a"))


@pytest.mark.parametrize("name", ["max_batch_size", "max_batch_input_tokens", "min_chunk_size"])
def test_limits_below_one_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: must be at least 1, was 0"):
        SchedulerRun(**{name: 0})


# -- Cancelling ------------------------------------------------------------------------------------------


def test_cancelling_frees_blocks_and_batch_slot_within_one_step() -> None:
    run = SchedulerRun(max_batch_size=2)
    for name in "abc":
        run.submit(name, 8, max_new_tokens=9)
    run.step()
    assert run.kv.num_free_blocks < 100
    run.scheduler.cancel("a")
    assert run.step() == [{"b": 1, "c": 8}]
    run.scheduler.cancel("b")
    run.scheduler.cancel("c")
    assert run.step() == []
    assert run.pipeline.released == ["a", "b", "c"]
    assert run.kv.num_free_blocks == 100
    assert not run.scheduler.has_work


def test_a_cancelled_waiting_context_leaves_no_stored_digests() -> None:
    run = SchedulerRun(max_batch_size=1)
    prompt = list(range(1, 20))
    run.submit("a", prompt, max_new_tokens=1)
    run.submit("b", prompt, max_new_tokens=1)
    run.scheduler.cancel("b")
    assert run.finish() == [{"a": 16}, {"a": 3}]
    assert run.pipeline.released == ["b", "a"]
    assert not run.kv._prefixes._chains


def test_a_preempted_context_can_be_cancelled() -> None:
    run = SchedulerRun(5)
    run.submit("a", 4, max_new_tokens=12)
    run.submit("b", 4, max_new_tokens=12)
    for _ in range(6):
        run.step()
    assert run.scheduler.num_waiting == 1
    run.scheduler.cancel("b")
    run.finish()
    assert run.scheduler.num_waiting == 0
    assert run.pipeline.released == ["b", "a"]


def test_cancelling_an_ended_or_unknown_request_does_nothing() -> None:
    run = SchedulerRun()
    run.submit("a", 3, max_new_tokens=1)
    run.finish()
    run.scheduler.cancel("a")
    run.scheduler.cancel("unknown")
    assert run.scheduler.has_work
    assert run.step() == []
    assert not run.scheduler.has_work
    assert run.pipeline.released == ["a"]


# -- Readiness and failures ------------------------------------------------------------------------------


def test_a_request_that_is_not_ready_is_overtaken() -> None:
    ready_names = {"b"}
    run = SchedulerRun(ready=lambda context: context.request_id in ready_names)
    run.submit("a", 3, max_new_tokens=1)
    run.submit("b", 3, max_new_tokens=2)
    assert run.step() == [{"b": 3}]
    assert run.step() == [{"b": 1}]
    assert run.step() == []
    assert run.scheduler.has_work
    ready_names.add("a")
    assert run.finish() == [{"a": 3}]


def test_an_input_error_in_ready_ends_only_its_request() -> None:
    def ready(context: TextContext) -> bool:
        if context.request_id == "a":
            raise InputError("the grammar does not compile")
        return True

    run = SchedulerRun(ready=ready)
    run.submit("a", 3, max_new_tokens=1)
    run.submit("b", 3, max_new_tokens=1)
    assert run.finish() == [{"b": 3}]
    assert str(run.scheduler.failures.pop("a")) == "the grammar does not compile"
    assert run.pipeline.released == ["a", "b"]


def test_a_step_checks_the_readiness_of_at_most_12_contexts() -> None:
    checked_names: list[str] = []
    run = SchedulerRun(ready=lambda context: bool(checked_names.append(context.request_id)), max_batch_size=3)
    for number in range(200):
        run.submit(f"r{number}", [1], max_new_tokens=1)
    for _ in range(5):
        run.step()
        assert 0 < len(checked_names) <= 12
        checked_names.clear()


def test_an_internal_error_in_ready_ends_only_its_request() -> None:
    def ready(context: TextContext) -> bool:
        if context.request_id == "a":
            raise KeyError("a mistake")
        return True

    run = SchedulerRun(ready=ready)
    run.submit("a", 3, max_new_tokens=1)
    run.submit("b", 3, max_new_tokens=1)
    assert run.finish() == [{"b": 3}]
    error = run.scheduler.failures.pop("a")
    assert type(error) is RequestFailedError
    assert isinstance(error.__cause__, KeyError)
    assert "mistake" not in str(error)


def test_a_failed_forward_changes_no_state() -> None:
    run = SchedulerRun(isolates_faults=False)
    run.submit("a", 20, max_new_tokens=3)
    run.submit("b", 4, max_new_tokens=3)
    run.step()
    run.pipeline.failing_requests = {"b"}
    for _ in range(2):
        with pytest.raises(FloatingPointError):
            run.step()
    assert (run.scheduler.num_running, run.scheduler.num_waiting) == (2, 0)
    run.scheduler.cancel("b")
    assert run.finish() == [{"a": 4}, {"a": 1}, {"a": 1}]


def test_a_request_whose_forward_fails_ends_and_others_continue() -> None:
    run = SchedulerRun()
    for name in "abcd":
        run.submit(name, 3, max_new_tokens=4)
    run.step()
    run.pipeline.failing_requests = {"c"}
    # The whole batch fails, then the half with c and d, then c.
    assert run.step() == [{"a": 1, "b": 1}, {"d": 1}]
    assert list(run.scheduler.failures) == ["c"]
    assert isinstance(run.scheduler.failures.pop("c").__cause__, FloatingPointError)
    assert run.scheduler.last_batch == (4, 4)
    assert run.pipeline.released == ["c"]
    assert run.finish() == [{"a": 1, "b": 1, "d": 1}] * 2


@pytest.mark.parametrize("isolates_faults", [True, False])
def test_a_context_that_the_pipeline_reports_as_failed_ends_alone(isolates_faults: bool) -> None:
    run = SchedulerRun(isolates_faults=isolates_faults)
    run.submit("a", 3, max_new_tokens=3)
    run.submit("b", 3, max_new_tokens=3)
    run.pipeline.invalid_outputs = {"a"}
    assert run.step() == [{"a": 3, "b": 3}]
    assert str(run.scheduler.failures.pop("a")) == "the output is invalid"
    assert not run.pipeline.failures
    assert run.finish() == [{"b": 1}] * 2


def test_each_request_is_reported_as_admitted_only_once() -> None:
    run = SchedulerRun(5)
    run.submit("a", 4, max_new_tokens=12)
    run.submit("b", 4, max_new_tokens=12)
    admitted_names = []
    while run.scheduler.has_work:
        run.step()
        admitted_names.append([context.request_id for context in run.scheduler.admitted])
    assert run.scheduler.num_preemptions == 1
    assert admitted_names == [["a", "b"], *[[]] * (len(admitted_names) - 1)]


def test_the_cost_of_a_step_does_not_depend_on_the_queue_length() -> None:
    def count_calls(num_waiting: int) -> int:
        run = SchedulerRun(1000, max_batch_size=3)
        for number in range(num_waiting):
            context = text_context([number], max_length=50, request_id=f"r{number}")
            run.scheduler.submit(context)
        run.scheduler.step()
        calls = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        gc.disable()  # the profiler would count callbacks of the garbage collector
        sys.setprofile(count)
        try:
            for _ in range(10):
                run.scheduler.step()
        finally:
            sys.setprofile(None)
            gc.enable()
        return calls

    assert count_calls(10_000) == count_calls(10)


def test_a_block_leak_is_detected_when_the_scheduler_is_idle() -> None:
    run = SchedulerRun()
    run.submit("a", 3, max_new_tokens=1)
    run.kv._pools[0].allocate(1)
    with pytest.raises(AssertionError, match="has 1 references and is in 0 tables"):
        run.step()


# -- Other tasks -----------------------------------------------------------------------------------------


def test_a_pipeline_without_a_cache_runs_and_releases_each_request() -> None:
    class EmbeddingsPipeline:
        kv = NullKVCache()
        trace: list[list[str]]

        def __init__(self) -> None:
            self.trace, self.released = [], []
            self.failures: dict[str, PenstockError] = {}

        def execute(self, batch: Any, num_steps: int = 1) -> dict[str, EmbeddingsResponse]:
            self.trace.append(list(batch))
            return {request_id: EmbeddingsResponse(np.zeros(3)) for request_id in batch}

        def release(self, context: TextContext) -> None:
            self.released.append(context.request_id)

    pipeline = EmbeddingsPipeline()
    scheduler: Scheduler[TextContext, EmbeddingsResponse] = Scheduler(
        pipeline, max_batch_size=2, max_batch_input_tokens=8, enable_chunked_prefill=False
    )
    for name in "abc":
        scheduler.submit(text_context([1, 2, 3], max_length=3, request_id=name))
    while scheduler.has_work:
        scheduler.step()
    assert pipeline.trace == [["a", "b"], ["c"]]
    assert pipeline.released == ["a", "b", "c"]


def test_importing_the_scheduler_loads_no_torch() -> None:
    script = "import penstock.scheduler, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
