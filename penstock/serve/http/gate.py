"""Whether requests are let in, and how many are inside."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Open until it is closed, once, when the server is about to end.

    Args:
        is_open: False where the model has still to be loaded; `open` comes then.
    """

    def __init__(self, *, is_open: bool = True) -> None:
        self._reason = "" if is_open else "the model is being loaded"
        self._is_closed = False
        self._num_inside = 0
        self._emptied = asyncio.Event()
        self._emptied.set()

    @property
    def reason(self) -> str:
        """Why nobody is let in; empty where the gate is open."""
        return self._reason

    @property
    def num_inside(self) -> int:
        """Requests that were let in and have not been answered to the end."""
        return self._num_inside

    def open(self) -> None:
        """Lets requests in, unless `close` came before."""
        if not self._is_closed:
            self._reason = ""

    def close(self) -> None:
        """Lets nobody in any more; those inside go on."""
        self._is_closed = True
        self._reason = "the server is shutting down"

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Counts a request while it is served."""
        self._num_inside += 1
        self._emptied.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._emptied.set()

    async def emptied(self, seconds: float) -> bool:
        """Waits until all that are inside have left; False where that takes longer."""
        try:
            async with asyncio.timeout(seconds):
                await self._emptied.wait()
        except TimeoutError:
            return False
        return True
