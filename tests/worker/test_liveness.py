"""Liveness: a worker hangs if it neither answers a ping nor makes progress for the hang limit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from penstock.worker import liveness
from penstock.worker.liveness import Liveness


@dataclass
class Worker:
    progress: int = 0
    is_suspended: bool = False


@pytest.fixture
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now[0])
    return now


def check_repeatedly(watch: Liveness, fake_clock: list[float], count: int) -> str:
    """Check every two seconds, up to ``count`` times. Return the first reason to kill the worker."""
    for _ in range(count):
        fake_clock[0] += 2
        if reason := watch.check(20):
            return reason
    return ""


def test_a_worker_without_a_pending_ping_is_not_reported(fake_clock: list[float]) -> None:
    assert check_repeatedly(Liveness(Worker(), 2), fake_clock, 100) == ""


def test_a_worker_without_answer_and_progress_is_reported_as_hanging(fake_clock: list[float]) -> None:
    watch = Liveness(Worker(), 2)
    watch.expect_answer()
    assert check_repeatedly(watch, fake_clock, 9) == ""
    assert check_repeatedly(watch, fake_clock, 1) == "no progress for 20 s"


def test_progress_or_an_answer_resets_the_silence(fake_clock: list[float]) -> None:
    worker = Worker()
    watch = Liveness(worker, 2)
    watch.expect_answer()
    assert check_repeatedly(watch, fake_clock, 9) == ""
    worker.progress += 1
    assert check_repeatedly(watch, fake_clock, 10) == ""
    assert watch.silence == 18
    watch.on_answer()
    watch.expect_answer()
    assert check_repeatedly(watch, fake_clock, 9) == ""


def test_a_long_pause_between_checks_counts_as_two_intervals(fake_clock: list[float]) -> None:
    watch = Liveness(Worker(), 2)
    watch.expect_answer()
    fake_clock[0] += 3600  # the server itself was suspended
    assert watch.check(20) == ""
    assert watch.silence == 4


def test_a_worker_is_suspended_if_two_consecutive_checks_find_it_stopped(fake_clock: list[float]) -> None:
    worker = Worker(is_suspended=True)
    watch = Liveness(worker, 2)
    assert watch.check(20) == ""
    worker.is_suspended = False
    assert watch.check(20) == ""
    worker.is_suspended = True
    assert (watch.check(20), watch.check(20)) == ("", "suspended by a signal")
