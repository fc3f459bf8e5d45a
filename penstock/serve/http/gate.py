"""`Gate`: tracks whether the server accepts requests, and counts the active requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Tracks whether the server accepts requests, and counts the active requests.

    Args:
        is_open: whether the server accepts requests from the start. False if the model is still being loaded;
            the server then accepts requests after the call of `open`.
    """

    def __init__(self, *, is_open: bool = True) -> None:
        self._refusal_reason = "" if is_open else "the model is being loaded"
        self._is_closed = False
        self._num_active = 0
        self._idle_event = asyncio.Event()
        self._idle_event.set()

    @property
    def refusal_reason(self) -> str:
        """The reason why requests are refused; empty if the gate is open."""
        return self._refusal_reason

    @property
    def num_active(self) -> int:
        """The number of accepted requests whose responses are not complete."""
        return self._num_active

    def open(self) -> None:
        """Accept requests. Does nothing after `close`."""
        if not self._is_closed:
            self._refusal_reason = ""

    def close(self) -> None:
        """Refuse new requests. Active requests continue."""
        self._is_closed = True
        self._refusal_reason = "the server is shutting down"

    @contextmanager
    def track(self) -> Iterator[None]:
        """Count a request as active for the duration of the ``with`` block."""
        self._num_active += 1
        self._idle_event.clear()
        try:
            yield
        finally:
            self._num_active -= 1
            if not self._num_active:
                self._idle_event.set()

    async def wait_until_idle(self, seconds: float) -> bool:
        """Wait for at most ``seconds`` until no request is active. Return False if the time has passed."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle_event.wait()
        except TimeoutError:
            return False
        return True
