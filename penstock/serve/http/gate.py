"""The gate: tracks whether the server accepts requests, and the number of active requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Accepts requests from the call of `open` until the call of `close` at shutdown.

    Args:
        is_open: False if the model is not loaded yet.
    """

    def __init__(self, *, is_open: bool = True) -> None:
        self._reason = "" if is_open else "the model is being loaded"
        self._is_closed = False
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def reason(self) -> str:
        """The reason why requests are refused; empty if the gate is open."""
        return self._reason

    @property
    def num_active(self) -> int:
        """The number of accepted requests whose responses are not complete."""
        return self._num_active

    def open(self) -> None:
        """Accept requests. Does nothing after `close`."""
        if not self._is_closed:
            self._reason = ""

    def close(self) -> None:
        """Refuse new requests. Active requests continue."""
        self._is_closed = True
        self._reason = "the server is shutting down"

    @contextmanager
    def track(self) -> Iterator[None]:
        """Count a request as active while the block runs."""
        self._num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_active -= 1
            if not self._num_active:
                self._idle.set()

    async def wait_until_idle(self, seconds: float) -> bool:
        """Wait until no request is active. Return False if that takes longer than ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
