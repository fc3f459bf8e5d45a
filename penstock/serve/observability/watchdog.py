"""Looks after the worker from outside, for the log: it ends nothing and starts nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.serve.observability.logs import log_event

if TYPE_CHECKING:
    from penstock.worker.engine_client import EngineClient

_log = logging.getLogger(__name__)


class Watchdog:
    """Reports a worker that is stuck: no step has ended for some time, although there is work.

    Args:
        worker: whom to watch.
        limit: seconds without a step until the first report, and between two.
        interval: seconds between two looks.
    """

    def __init__(self, worker: EngineClient, limit: float, interval: float = 0.5) -> None:
        self._worker = worker
        self._limit = limit
        self._interval = interval
        self._num_steps = -1
        self._moved_at = time.perf_counter()
        self._state: str = worker.state

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(self._interval)

    def look(self) -> None:
        """Reports what has changed since the last look, if it has to be reported."""
        worker, now = self._worker, time.perf_counter()
        if worker.state != self._state:
            level = logging.ERROR if worker.state == "restarting" else logging.INFO
            log_event(_log, level, "worker", state=worker.state, was=self._state, **self._numbers())
            self._state, self._moved_at = worker.state, now
        if not worker.num_outstanding or worker.stats.num_steps != self._num_steps:
            self._num_steps, self._moved_at = worker.stats.num_steps, now
        elif now - self._moved_at >= self._limit:
            seconds = round(now - self._moved_at, 1)
            log_event(_log, logging.ERROR, "no step has ended", for_s=seconds, **self._numbers())
            self._moved_at = now

    def _numbers(self) -> dict[str, Any]:
        worker = self._worker
        stats: dict[str, Any] = msgspec.structs.asdict(worker.stats)
        return {"outstanding": worker.num_outstanding, "restarts": worker.num_restarts, **stats}
