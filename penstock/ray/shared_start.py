"""`SharedStart`: loads a model once for all calls of an actor or a replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from penstock.errors import UnavailableError

_LOG = logging.getLogger("penstock.ray")

MAX_STARTS = 5
"""Maximum number of attempts to load a model. The call fails if the worker process ends in every attempt."""
RETRY_SECONDS = 1.0
"""Seconds from a failed attempt to the next attempt."""


class SharedStart:
    """Callable that loads a model once for all calls.

    If the worker process ends while it loads the model, the model is loaded again, in at most `MAX_STARTS`
    attempts. After a failure, the next call loads the model again.

    Args:
        start: the function that loads the model. It raises UnavailableError if the worker process ends, and
            can be called again after any error.
        retry_seconds: seconds from a failed attempt to the next attempt.
    """

    def __init__(self, start: Callable[[], Awaitable[None]], retry_seconds: float = RETRY_SECONDS) -> None:
        self._start = start
        self._retry_seconds = retry_seconds
        self._task: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        """Wait until the model is loaded. The first call starts the load.

        Raises:
            PenstockError: the model cannot be loaded, or its worker process ended in `MAX_STARTS` attempts.
        """
        if self._task is None:
            self._task = asyncio.ensure_future(self._start_with_retries())
            self._task.add_done_callback(self._forget_failure)
        await asyncio.shield(self._task)

    async def _start_with_retries(self) -> None:
        for attempt in range(1, MAX_STARTS + 1):
            try:
                return await self._start()
            except UnavailableError as error:
                if attempt == MAX_STARTS:
                    raise
                _LOG.warning("attempt %d of %d to load the model failed: %s", attempt, MAX_STARTS, error)
                await asyncio.sleep(self._retry_seconds)

    def _forget_failure(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._task = None
