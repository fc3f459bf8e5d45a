"""`StepLimit`: short steps while one client has many running requests and other clients send requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from support.fake_pipeline import FakePipeline, expected_output_tokens
from support.kv_contexts import kv_manager, text_context

from penstock.pipelines.core import TextContext, TextGenerationResponse
from penstock.scheduler import Scheduler
from penstock.scheduler.step_limit import StepTime


class TimedPipeline(FakePipeline):
    """A pipeline with simulated time: a time per step, and a time per decode row or per 4 prompt tokens."""

    def __init__(self, fixed_seconds: float, seconds_per_row: float) -> None:
        super().__init__(kv_manager(4000))
        self.fixed_seconds, self.seconds_per_row = fixed_seconds, seconds_per_row
        self.seconds = 0.0
        self.call_seconds: list[float] = []
        self.num_steps: list[int] = []

    def execute(
        self, batch: Mapping[str, TextContext], num_steps: int = 1
    ) -> dict[str, TextGenerationResponse]:
        lengths = [context.active_length for context in batch.values()]
        rows = sum(length if length == 1 else length / 4 for length in lengths)
        self.call_seconds.append((self.fixed_seconds + self.seconds_per_row * rows) * num_steps)
        self.num_steps.append(num_steps)
        self.seconds += self.call_seconds[-1]
        return super().execute(batch, num_steps)


class TimedRun:
    """A scheduler with a timed pipeline. The first letter of a request id is the client id."""

    def __init__(self, fixed_seconds: float, seconds_per_row: float) -> None:
        self.pipeline = TimedPipeline(fixed_seconds, seconds_per_row)
        self.scheduler: Scheduler[TextContext, TextGenerationResponse] = Scheduler(
            self.pipeline, max_batch_size=160, clock=lambda: self.pipeline.seconds
        )
        self.tokens: dict[str, list[int]] = {}

    def submit(self, name: str, num_new_tokens: int) -> None:
        self.tokens[name] = []
        context = text_context(
            [sum(map(ord, name))] * 3, max_length=3 + num_new_tokens, request_id=name, client_id=name[0]
        )
        self.scheduler.submit(context)

    def step(self, num_steps: int = 1) -> float:
        """Call the scheduler once and return the duration in seconds."""
        seconds_before = self.pipeline.seconds
        for name, output in self.scheduler.step(num_steps).items():
            self.tokens[name] += [int(token.next_token) for token in output.tokens]
        return self.pipeline.seconds - seconds_before

    def start_competing_clients(self, num_rows: int, num_new_tokens: int = 40) -> None:
        """Start ``num_rows`` sequences of client ``a``, then run two short requests of client ``b``."""
        for number in range(num_rows):
            self.submit(f"a{number}", num_new_tokens)
        for request in ("b0", "b1"):
            self.step()
            self.submit(request, 2)
            while len(self.tokens[request]) < 2:
                self.step()

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()
        for name, tokens in self.tokens.items():
            prompt = [sum(map(ord, name))] * 3
            assert tokens == expected_output_tokens(text_context(prompt, max_length=3 + len(tokens))), name


def test_steps_take_at_most_about_5_ms_and_have_more_than_8_rows_while_another_client_sends_requests() -> (
    None
):
    run = TimedRun(fixed_seconds=0.001, seconds_per_row=0.0002)
    run.start_competing_clients(128)
    durations = [run.step() for _ in range(40)]
    assert max(durations) <= 0.0051
    assert min(map(len, run.pipeline.trace[-40:])) > 8
    run.finish()


def test_a_step_may_take_twice_its_fixed_time() -> None:
    run = TimedRun(fixed_seconds=0.010, seconds_per_row=0.001)
    run.start_competing_clients(128)
    durations = [run.step() for _ in range(40)]
    assert max(durations) == pytest.approx(0.020, rel=0.05)
    run.finish()


def test_all_sequences_decode_equally_often() -> None:
    run = TimedRun(fixed_seconds=0.001, seconds_per_row=0.0002)
    run.start_competing_clients(128)
    lengths_before = {name: len(tokens) for name, tokens in run.tokens.items()}
    rows = Counter[str]()
    for _ in range(40):
        run.step()
        rows.update(run.pipeline.trace[-1].keys())
    sequences = [name for name in lengths_before if name.startswith("a")]
    steps_per_sequence = [rows[name] for name in sequences]
    assert min(steps_per_sequence) >= 5
    assert max(steps_per_sequence) - min(steps_per_sequence) <= 2, "sequences differ by more than two steps"
    run.finish()


def test_a_client_decodes_all_rows_about_two_seconds_after_the_last_competitor() -> None:
    run = TimedRun(fixed_seconds=0.001, seconds_per_row=0.0002)
    run.start_competing_clients(128, num_new_tokens=900)
    while run.pipeline.seconds < 60 and len(run.pipeline.trace[-1]) < 128:
        run.step()
    assert len(run.pipeline.trace[-1]) == 128
    assert 1.9 < run.pipeline.seconds < 2.4


def test_steps_of_many_clients_are_not_limited() -> None:
    run = TimedRun(fixed_seconds=0.001, seconds_per_row=0.002)
    for client in "abcdefghijklmnop":
        for number in range(8):
            run.submit(f"{client}{number}", 30)
        run.step()
    for _ in range(10):
        run.step()
        assert len(run.pipeline.trace[-1]) == 128


def test_steps_are_not_limited_if_their_time_does_not_depend_on_rows() -> None:
    run = TimedRun(fixed_seconds=0.040, seconds_per_row=0.0)
    run.start_competing_clients(128)
    run.step()
    assert len(run.pipeline.trace[-1]) == 128


def test_the_limit_applies_to_the_total_time_of_a_call() -> None:
    run = TimedRun(fixed_seconds=0.0005, seconds_per_row=0.00005)
    run.start_competing_clients(32)
    assert run.step(8) <= 0.005
    assert run.pipeline.num_steps[-1] == 2
    run.finish()


def test_clients_with_few_sequences_decode_in_every_step() -> None:
    run = TimedRun(fixed_seconds=0.001, seconds_per_row=0.0002)
    run.start_competing_clients(100, num_new_tokens=900)
    for number in range(6):
        run.submit(f"c{number}", 400)
    for _ in range(30):
        run.step()
    for batch in run.pipeline.trace[-10:]:
        assert sum(name.startswith("c") for name in batch) == 6
        assert 8 <= sum(name.startswith("a") for name in batch) < 20


def test_step_time_fits_fixed_and_per_row_seconds_and_follows_changes() -> None:
    estimate = StepTime()
    for number in range(100):
        rows = 1 + number % 50
        estimate.record(rows, 0.003 + 0.0004 * rows)
    assert estimate.fixed_seconds == pytest.approx(0.003)
    assert estimate.seconds_per_row == pytest.approx(0.0004)
    for number in range(400):
        rows = 1 + number % 50
        estimate.record(rows, 0.002 + 0.0001 * rows)
    assert estimate.fixed_seconds == pytest.approx(0.002, rel=0.05)
    assert estimate.seconds_per_row == pytest.approx(0.0001, rel=0.05)


def test_the_fit_changes_only_while_recent_steps_have_different_sizes() -> None:
    estimate = StepTime()
    for _ in range(50):
        estimate.record(64, 0.01)
    assert estimate.fixed_seconds is None
    estimate.record(1, 0.001)
    assert estimate.fixed_seconds is not None
    fit = estimate.fixed_seconds, estimate.seconds_per_row
    for _ in range(2000):
        estimate.record(64, 0.02)
    assert estimate.seconds_per_row != fit[1], "after steps of two sizes, the fit follows later steps"
    fit = estimate.fixed_seconds, estimate.seconds_per_row
    for _ in range(50):
        estimate.record(64, 0.03)
    assert (estimate.fixed_seconds, estimate.seconds_per_row) == fit
