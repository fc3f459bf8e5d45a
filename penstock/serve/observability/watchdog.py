"""The watchdog: logs state changes of the engine, and long times without a finished step."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import msgspec

from penstock.serve.observability.logs import log_event

if TYPE_CHECKING:
    from penstock.worker.engine_client import EngineClient

_log = logging.getLogger(__name__)


class Watchdog:
    """Logs state changes of the engine, and an error if no step ends while requests are outstanding.

    Does not restart workers.

    Args:
        engine: the engine to watch.
        limit: seconds without a finished step after which an error is logged. The error is repeated every
            `limit` seconds.
        interval: seconds between two checks.
    """

    def __init__(self, engine: EngineClient, limit: float, interval: float = 0.5) -> None:
        self._engine = engine
        self._limit = limit
        self._interval = interval
        self._num_steps = -1
        self._progress_at = time.perf_counter()
        self._state: str = engine.state

    async def run(self) -> None:
        """Check at each interval until cancelled."""
        while True:
            self.check()
            await asyncio.sleep(self._interval)

    def check(self) -> None:
        """Log a state change since the last check.

        Log an error if requests are outstanding and no step has ended for `limit` seconds.
        """
        engine, now = self._engine, time.perf_counter()
        if engine.state != self._state:
            level = logging.ERROR if engine.state == "restarting" else logging.INFO
            log_event(_log, level, "worker", state=engine.state, was=self._state, **self._log_fields())
            self._state, self._progress_at = engine.state, now
        if not engine.num_outstanding or engine.stats.num_steps != self._num_steps:
            self._num_steps, self._progress_at = engine.stats.num_steps, now
        elif now - self._progress_at >= self._limit:
            seconds = round(now - self._progress_at, 1)
            log_event(_log, logging.ERROR, "no step has ended", for_s=seconds, **self._log_fields())
            self._progress_at = now

    def _log_fields(self) -> dict[str, object]:
        engine = self._engine
        stats: dict[str, object] = msgspec.structs.asdict(engine.stats)
        return {"outstanding": engine.num_outstanding, "restarts": engine.num_restarts, **stats}
