"""The worker's loop without a process: commands, steps, reports, and preparation while idle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq
from support.kv_contexts import kv_manager
from support.workers import FakeAdapters, GatedPipeline, fake_runtime, letters_in_order, make_request

from penstock.errors import InputError
from penstock.pipelines.core import TextGenerationStatus
from penstock.worker.messages import (
    Admission,
    CallResult,
    Cancel,
    LoadAdapter,
    Ping,
    Pong,
    StepResults,
    Stop,
    Submit,
    TextResult,
    WorkerMessage,
    WorkerStats,
)
from penstock.worker.process import WorkerRuntime, _Loop

END = TextGenerationStatus.END_OF_SEQUENCE


class Worker:
    """A worker loop whose steps are run by the test, and its collected reports."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self.reports: list[WorkerMessage] = []
        self._socket: Any = None
        self.loop = _Loop(runtime, self._socket, self.reports.append)

    def process(self, *commands: Any) -> list[WorkerMessage]:
        """Handle the commands, run a step if the scheduler has work, and return the reports."""
        self.reports.clear()
        for command in commands:
            self.loop._handle(command)
        self.loop._step()
        return list(self.reports)

    def results(self, *commands: Any) -> StepResults:
        (report,) = self.process(*commands)
        assert isinstance(report, StepResults)
        return report

    @property
    def num_request_entries(self) -> int:
        return len(self.loop._contexts) + len(self.loop._lengths)


def make_worker(pipeline: GatedPipeline | None = None, **options: Any) -> Worker:
    return Worker(
        fake_runtime(pipeline or GatedPipeline(choose=letters_in_order(2), kv=kv_manager(60)), **options)
    )


def test_reports_contain_the_progress_of_a_request() -> None:
    worker = make_worker(max_batch_input_tokens=8)
    report = worker.results(Submit(make_request("a", "0123456789")))
    assert report.admissions == [Admission("a", 0)]
    assert report.results == []  # the step computed only the first chunk of the prompt
    assert worker.results().results == [TextResult("a", [97])]
    assert worker.results().results == [TextResult("a", [98])]
    report = worker.results()
    assert report.results == [TextResult("a", [], END)]
    assert (report.stats.num_steps, report.stats.num_generated_tokens) == (4, 3)
    assert worker.process() == []
    assert worker.num_request_entries == 0


def test_no_state_of_ended_requests_remains() -> None:
    pipeline = GatedPipeline(choose=letters_in_order(9), kv=kv_manager(60))
    pipeline.failing_requests = {"b"}
    worker = make_worker(pipeline)
    report = worker.results(*(Submit(make_request(name)) for name in "abc"), Submit(make_request("c")))
    assert sorted(failure.request_id for failure in report.failures) == ["b", "c"]
    assert "already submitted" in next(f.error.message for f in report.failures if f.request_id == "c")
    report = worker.results(Cancel("a"), Cancel("b"), Cancel("c"), Cancel("c"), Cancel("unknown"))
    assert report.cancelled == ["a", "c"]
    assert report.results == []
    assert report.stats.num_used_blocks == 0
    assert worker.num_request_entries == 0


def test_a_context_that_is_not_ready_causes_no_report() -> None:
    ready_flags: list[bool] = []
    worker = make_worker(ready=lambda context: bool(ready_flags))
    assert worker.process(Submit(make_request("a"))) == []
    ready_flags.append(True)
    assert worker.results().admissions == [Admission("a", 0)]


def test_the_answer_to_a_ping_includes_counts() -> None:
    def add_draft_counts(stats: WorkerStats) -> None:
        stats.num_draft_tokens, stats.num_accepted_draft_tokens, stats.num_verified_steps = 9, 4, 3

    worker = Worker(
        WorkerRuntime(
            scheduler=fake_runtime(GatedPipeline()).scheduler,
            info=fake_runtime(GatedPipeline()).info,
            add_counts=add_draft_counts,
        )
    )
    (report,) = worker.process(Ping())
    assert isinstance(report, Pong)
    stats = report.stats
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens, stats.num_verified_steps) == (9, 4, 3)


def test_a_failed_adapter_load_is_reported_without_the_text_of_internal_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class FailingAdapters(FakeAdapters):
        def load(self, name: str, path: str) -> None:
            raise ZeroDivisionError("a secret of ours") if path == "broken" else InputError("too large")

    worker = Worker(fake_runtime(GatedPipeline(), FailingAdapters()))
    (broken_result, large_result) = worker.process(
        LoadAdapter(1, "a", "broken"), LoadAdapter(2, "a", "large")
    )
    assert isinstance(broken_result, CallResult)
    assert broken_result.error is not None
    assert broken_result.error.name == "RequestFailedError"
    assert "secret" not in broken_result.error.message
    assert "a secret of ours" in caplog.text
    assert isinstance(large_result, CallResult)
    assert large_result.error is not None
    assert (large_result.call_id, large_result.error.message) == (2, "too large")


def test_stop_ends_the_loop() -> None:
    worker = make_worker()
    worker.loop._handle(Stop())
    worker.loop.run()


class Socket:
    """A fake socket. A frame ``(n, data)`` arrives at poll number n. A blocking poll waits for a frame."""

    def __init__(self, *frames: tuple[int, bytes]) -> None:
        self.frames = list(frames)
        self.num_polls = 0
        self.waits: list[int | None] = []

    def poll(self, timeout: int | None = None) -> int:
        self.num_polls += 1
        if timeout != 0:
            self.waits.append(timeout)
            self.num_polls = max(self.num_polls, self.frames[0][0])
        return int(self.frames[0][0] <= self.num_polls)

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.frames or self.frames[0][0] > self.num_polls:
            raise zmq.Again
        return [self.frames.pop(0)[1]]


@pytest.mark.parametrize(("num_polls", "num_prepared"), [(1, 0), (3, 2), (9, 5)])
def test_an_idle_worker_calls_prepare_next_until_a_command_arrives_or_nothing_remains(
    num_polls: int, num_prepared: int
) -> None:
    remaining_parts = list(range(5))

    def prepare_next() -> bool:
        remaining_parts.pop()
        return bool(remaining_parts)

    runtime = replace(fake_runtime(GatedPipeline()), prepare_next=prepare_next)
    socket: Any = Socket((num_polls, msgspec.msgpack.encode(Stop())))
    _Loop(runtime, socket, lambda report: None).run()
    assert 5 - len(remaining_parts) == num_prepared
    assert socket.waits == [None], "the worker waits once, without a time limit"
