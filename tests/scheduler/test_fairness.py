"""Fairness between clients: admission, preemption, the number of preemptions, and deferral."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from support.fake_pipeline import FakePipeline, expected_output_tokens
from support.kv_contexts import kv_manager, text_context

from penstock.pipelines.core import TextContext, TextGenerationResponse
from penstock.scheduler import Scheduler


class FairnessRun:
    """A scheduler with a fake pipeline. The first letter of a request id is the client id."""

    def __init__(self, num_blocks: int = 1000, **options: Any) -> None:
        self.pipeline = FakePipeline(kv_manager(num_blocks))
        settings = {"max_batch_size": 4, "max_batch_input_tokens": 16, "min_chunk_size": 4}
        self.scheduler: Scheduler[TextContext, TextGenerationResponse] = Scheduler(
            self.pipeline, clock=lambda: 0.0, **(settings | options)
        )
        self.contexts: dict[str, TextContext] = {}
        self.tokens: dict[str, list[int]] = {}
        self.admitted: list[str] = []

    def submit(self, name: str, num_prompt_tokens: int, max_new_tokens: int, **fields: Any) -> None:
        tokens = [sum(map(ord, name))] * num_prompt_tokens
        context = text_context(
            tokens,
            max_length=num_prompt_tokens + max_new_tokens,
            request_id=name,
            client_id=name[0],
            **fields,
        )
        self.contexts[name], self.tokens[name] = context, []
        self.scheduler.submit(context)

    def step(self) -> dict[str, int]:
        num_steps_before = len(self.pipeline.trace)
        for name, output in self.scheduler.step().items():
            self.tokens[name] += [int(token.next_token) for token in output.tokens]
        self.admitted += [context.request_id for context in self.scheduler.admitted]
        return dict(*self.pipeline.trace[num_steps_before:])

    def run_until_token(self, name: str) -> int:
        """Run steps until a request has an output token. Return the number of steps."""
        for count in range(1, 2000):
            self.step()
            if self.tokens[name]:
                return count
        raise AssertionError(f"{name} has no token after 2000 steps")

    def finish(self) -> int:
        count = 0
        while self.scheduler.has_work:
            self.step()
            count += 1
            assert count < 20_000
        for name, context in self.contexts.items():
            new_context = text_context(context.prompt_tokens.tolist(), max_length=context.max_length)
            assert self.tokens[name] == expected_output_tokens(new_context), name
        return count

    def count_running_per_client(self) -> Counter[str]:
        return Counter(name[0] for name, context in self.contexts.items() if context.is_assigned_to_cache)


def test_admission_alternates_between_clients_in_arrival_order() -> None:
    run = FairnessRun(max_batch_size=1)
    for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
        run.submit(name, 3, max_new_tokens=2)
    run.finish()
    assert run.admitted == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_free_batch_slots_are_shared_evenly() -> None:
    run = FairnessRun()
    for number in range(9):
        run.submit(f"a{number}", 1, max_new_tokens=20)
    for number in range(9):
        run.submit(f"b{number}", 1, max_new_tokens=20)
    run.step()
    assert run.count_running_per_client() == {"a": 2, "b": 2}
    assert run.scheduler.num_preemptions == 0
    run.finish()
    assert run.scheduler.num_preemptions == 0


def test_a_request_of_the_client_that_fills_the_batch_is_preempted_at_once() -> None:
    run = FairnessRun()
    for number in range(32):
        run.submit(f"a{number}", 4, max_new_tokens=60)
    for _ in range(20):
        run.step()
    assert run.count_running_per_client() == {"a": 4}
    run.submit("b", 4, max_new_tokens=3)
    assert run.run_until_token("b") == 1
    assert run.count_running_per_client() == {"a": 3, "b": 1}
    assert run.scheduler.num_preemptions == 1
    assert not run.contexts["a3"].is_assigned_to_cache, "the youngest request is preempted"
    run.finish()


def test_two_clients_get_half_of_the_batch_slots_each() -> None:
    run = FairnessRun(max_batch_size=8, max_batch_input_tokens=64)
    for number in range(16):
        run.submit(f"a{number}", 4, max_new_tokens=100)
    run.step()
    for number in range(16):
        run.submit(f"b{number}", 4, max_new_tokens=100)
    run.step()
    assert run.count_running_per_client() == {"a": 4, "b": 4}
    assert run.scheduler.num_preemptions == 4
    for _ in range(50):
        run.step()
    assert run.scheduler.num_preemptions == 4, "no context is preempted once the slots are shared equally"
    run.finish()


def test_a_request_of_the_client_that_holds_all_blocks_is_preempted() -> None:
    run = FairnessRun(24, max_batch_size=8)
    for number in range(3):
        run.submit(f"a{number}", 4, max_new_tokens=28)
    for _ in range(27):
        run.step()
    assert run.scheduler.kv.num_free_blocks < 4
    run.submit("b", 12, max_new_tokens=2)
    assert run.run_until_token("b") == 1
    assert run.scheduler.num_preemptions > 0
    run.finish()


def test_requests_of_a_single_client_do_not_preempt_each_other() -> None:
    run = FairnessRun()
    for number in range(20):
        run.submit(f"a{number}", 4, max_new_tokens=30)
    run.finish()
    assert run.scheduler.num_preemptions == 0
    assert run.admitted == [f"a{number}" for number in range(20)]


def test_consecutive_requests_cause_one_preemption() -> None:
    """After the first preemption, one batch slot stays reserved for some steps."""
    run = FairnessRun()
    for number in range(8):
        run.submit(f"a{number}", 4, max_new_tokens=400)
    for _ in range(5):
        run.step()
    for number in range(10):
        run.submit(f"b{number}", 4, max_new_tokens=2)
        assert run.run_until_token(f"b{number}") == 1
        for _ in range(8):
            run.step()
    assert run.scheduler.num_preemptions == 1
    for _ in range(64):
        run.step()
    assert run.count_running_per_client() == {"a": 4}, "the first client uses the reserved slot again"
    run.finish()


def test_a_short_prompt_overtakes_a_long_prompt_of_another_client() -> None:
    run = FairnessRun()
    run.submit("a", 160, max_new_tokens=1)
    run.step()
    run.submit("b", 6, max_new_tokens=1)
    assert run.step() == {"b": 6, "a": 10}
    run.finish()


def test_chunks_of_two_long_prompts_alternate() -> None:
    run = FairnessRun()
    run.submit("a", 64, max_new_tokens=1)
    run.submit("b", 64, max_new_tokens=1)
    rows = [run.step() for _ in range(8)]
    assert rows == [{"a": 16}, {"b": 16}] * 4
    run.finish()


def test_new_clients_do_not_starve_a_long_prompt() -> None:
    run = FairnessRun()
    run.submit("a", 64, max_new_tokens=1)
    names = iter("bcdefghijklmnopqrstuvwxyzBCDEFGHIJKLMNOPQRSTUVWXYZ")
    steps = 0
    while not run.tokens["a"]:
        run.submit(next(names), 16, max_new_tokens=1)  # this prompt takes a whole step
        run.step()
        steps += 1
    assert steps <= 16
    run.finish()


def test_a_request_does_not_preempt_requests_of_higher_priority() -> None:
    run = FairnessRun(max_batch_size=2)
    run.submit("a1", 4, max_new_tokens=20, priority=1)
    run.submit("a2", 4, max_new_tokens=20, priority=1)
    run.step()
    run.submit("b", 4, max_new_tokens=2)
    assert run.run_until_token("b") == 20
    assert run.scheduler.num_preemptions == 0
    run.finish()


def test_a_request_of_the_client_with_the_most_slots_is_preempted_if_blocks_run_out() -> None:
    run = FairnessRun(10, max_batch_size=4)
    run.submit("a1", 4, max_new_tokens=16)
    run.submit("a2", 4, max_new_tokens=16)
    run.submit("b", 4, max_new_tokens=16)  # the youngest request
    while not run.scheduler.num_preemptions:
        run.step()
    assert run.count_running_per_client() == {"a": 1, "b": 1}
    run.finish()


@pytest.mark.parametrize("num_clients", [1, 3])
def test_no_state_of_ended_clients_remains(num_clients: int) -> None:
    run = FairnessRun()
    for number in range(12):
        run.submit("abc"[number % num_clients] + str(number), 4, max_new_tokens=5)
    run.step()
    run.scheduler.cancel("a0")
    run.scheduler.cancel("a9")
    while run.scheduler.has_work:
        run.step()
    shares = run.scheduler._shares
    assert not shares._num_contexts
    assert not shares._num_slots
    assert not shares._turns


LARGE_BATCH = {"max_batch_size": 40, "max_batch_input_tokens": 128}


class TestDeferral:
    """A step with a short prompt of one client defers most decode rows of another client."""

    def start_decoding_client(self) -> FairnessRun:
        """Return a run with 30 decoding contexts of client ``a``."""
        run = FairnessRun(**LARGE_BATCH)
        for number in range(30):
            run.submit(f"a{number:02}", 1, max_new_tokens=50)
        run.step()
        assert len(run.step()) == 30
        return run

    def test_a_short_prompt_runs_with_few_rows_of_the_other_client(self) -> None:
        run = self.start_decoding_client()
        run.submit("b", 3, max_new_tokens=50)
        rows = run.step()
        assert rows.pop("b") == 3
        assert list(rows) == [f"a{number:02}" for number in range(4)]
        assert len(run.step()) == 31
        run.finish()

    def test_rows_are_not_deferred_in_two_consecutive_steps(self) -> None:
        run = self.start_decoding_client()
        row_counts = []
        for client in "bcdef":
            run.submit(client, 3, max_new_tokens=2)
            row_counts.append(sum(name[0] == "a" for name in run.step()))
        assert row_counts == [4, 30, 4, 30, 4]
        run.finish()

    def test_no_rows_are_deferred_if_the_prompt_takes_as_long_as_the_deferred_rows_or_longer(self) -> None:
        run = self.start_decoding_client()
        run.submit("b", 104, max_new_tokens=2)
        assert sum(name[0] == "a" for name in run.step()) == 30
        run.submit("c", 103, max_new_tokens=2)
        assert sum(name[0] == "a" for name in run.step()) == 4
        run.finish()

    def test_no_rows_are_deferred_for_a_prompt_of_the_same_client(self) -> None:
        run = self.start_decoding_client()
        run.submit("a30", 3, max_new_tokens=2)
        assert len(run.step()) == 31
        run.finish()

    def test_no_rows_are_deferred_for_a_prompt_that_cannot_run(self) -> None:
        run = FairnessRun(**(LARGE_BATCH | {"max_batch_size": 30}))
        for number in range(30):
            run.submit(f"a{number:02}", 1, max_new_tokens=50, priority=1)
        run.step()
        run.submit("b", 3, max_new_tokens=2)
        assert len(run.step()) == 30
        run.finish()
