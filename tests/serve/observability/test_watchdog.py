"""Reports of the watchdog about stalled and dead workers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.engines import FakeEngine

from penstock.serve.observability.watchdog import Watchdog
from penstock.worker.messages import WorkerStats


class WatchedWorker:
    """A fake worker, and a watchdog with a fake clock that checks the worker when a test calls `check_at`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.now = 0.0
        monkeypatch.setattr("penstock.serve.observability.watchdog.time.perf_counter", lambda: self.now)
        caplog.set_level("INFO")
        self.caplog = caplog
        self.worker = FakeEngine()
        self.watchdog = Watchdog(self.worker, limit=10)

    def check_at(self, seconds: float) -> list[tuple[str, Any]]:
        """Check at the given time in seconds. Return (level, fields) of each report."""
        self.now = seconds
        self.caplog.clear()
        self.watchdog.check()
        return [(record.levelname, record.fields) for record in self.caplog.records]  # type: ignore[attr-defined]


@pytest.fixture
def watched_worker(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> WatchedWorker:
    return WatchedWorker(monkeypatch, caplog)


def test_an_idle_worker_is_not_reported(watched_worker: WatchedWorker) -> None:
    assert [watched_worker.check_at(second) for second in range(0, 100, 5)] == [[]] * 20


def test_a_worker_that_makes_progress_is_not_reported(watched_worker: WatchedWorker) -> None:
    watched_worker.worker.num_outstanding = 3
    for second in range(0, 100, 5):
        watched_worker.worker.stats = WorkerStats(num_steps=second)
        assert watched_worker.check_at(second) == []


def test_a_stalled_worker_is_reported_repeatedly(watched_worker: WatchedWorker) -> None:
    watched_worker.check_at(0)
    watched_worker.worker.num_outstanding = 3
    watched_worker.worker.stats = WorkerStats(num_steps=7, num_waiting=2, num_used_blocks=5)
    assert watched_worker.check_at(1) == []
    assert watched_worker.check_at(10.5) == []
    [(level, fields)] = watched_worker.check_at(11)
    assert level == "ERROR"
    assert (fields["for_s"], fields["num_steps"], fields["num_waiting"]) == (10, 7, 2)
    assert fields["num_used_blocks"] == 5
    assert fields["outstanding"] == 3
    assert watched_worker.check_at(20) == []
    assert len(watched_worker.check_at(21)) == 1
    watched_worker.worker.num_outstanding = 0
    assert watched_worker.check_at(40) == []


def test_time_without_work_does_not_count(watched_worker: WatchedWorker) -> None:
    watched_worker.check_at(0)
    watched_worker.check_at(50)
    watched_worker.worker.num_outstanding = 1
    assert watched_worker.check_at(55) == []
    assert len(watched_worker.check_at(61)) == 1


def test_the_death_and_restart_of_a_worker_are_reported(watched_worker: WatchedWorker) -> None:
    watched_worker.worker.state, watched_worker.worker.num_restarts = "restarting", 1
    [(level, fields)] = watched_worker.check_at(1)
    assert (level, fields["state"], fields["was"], fields["restarts"]) == ("ERROR", "restarting", "ready", 1)
    assert watched_worker.check_at(2) == []
    watched_worker.worker.state = "ready"
    [(level, fields)] = watched_worker.check_at(3)
    assert (level, fields["state"]) == ("INFO", "ready")


async def test_the_watchdog_checks_repeatedly(watched_worker: WatchedWorker) -> None:
    watchdog = Watchdog(watched_worker.worker, limit=10, interval=0.001)
    task = asyncio.create_task(watchdog.run())
    await asyncio.sleep(0.02)
    watched_worker.worker.state = "restarting"
    while not watched_worker.caplog.records:
        await asyncio.sleep(0.001)
    task.cancel()
