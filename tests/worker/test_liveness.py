"""Silence is what was seen of it: without an answer, without progress, while somebody looked."""

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
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now[0])
    return now


def looks(watch: Liveness, clock: list[float], count: int) -> str:
    """Looks every two seconds, until there is a reason to end the worker."""
    for _ in range(count):
        clock[0] += 2
        if why := watch.look(20):
            return why
    return ""


def test_a_worker_that_was_not_asked_may_be_silent(clock: list[float]) -> None:
    assert looks(Liveness(Worker(), 2), clock, 100) == ""


def test_without_an_answer_and_without_progress_it_hangs(clock: list[float]) -> None:
    watch = Liveness(Worker(), 2)
    watch.ask()
    assert looks(watch, clock, 9) == ""
    assert looks(watch, clock, 1) == "no progress for 20 s"


def test_progress_or_an_answer_begin_anew(clock: list[float]) -> None:
    worker = Worker()
    watch = Liveness(worker, 2)
    watch.ask()
    assert looks(watch, clock, 9) == ""
    worker.progress += 1
    assert looks(watch, clock, 10) == ""
    assert watch.silence == 18
    watch.hear()
    watch.ask()
    assert looks(watch, clock, 9) == ""


def test_a_server_that_did_not_look_does_not_know(clock: list[float]) -> None:
    watch = Liveness(Worker(), 2)
    watch.ask()
    clock[0] += 3600  # it was suspended itself
    assert watch.look(20) == ""
    assert watch.silence == 4


def test_a_worker_that_is_suspended_twice_in_a_row(clock: list[float]) -> None:
    worker = Worker(is_suspended=True)
    watch = Liveness(worker, 2)
    assert watch.look(20) == ""
    worker.is_suspended = False
    assert watch.look(20) == ""
    worker.is_suspended = True
    assert (watch.look(20), watch.look(20)) == ("", "suspended by a signal")
