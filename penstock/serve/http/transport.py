"""A transport that closes in stages (RFC 9112, 9.6) and detects clients that are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

LINGER_BYTES = 64 * 2**20
"""Bytes of a request that are discarded after its answer; with more the connection is reset."""
LINGER_SECONDS = 30.0
"""Seconds in which they must arrive."""
LINGER_PAUSE = 5.0
"""Seconds without a byte after which none is waited for."""

_PROBE = b"HTTP/1.1 "
"""How every answer begins: it may be sent before the rest of the answer is known."""
_PROBE_PAUSES = (0.05, 0.05, 0.3, 1.0, 4.0, 15.0, 40.0, 120.0, 420.0)
"""Seconds before each byte of it."""


class ClosingTransport:
    """A connection's transport as uvicorn sees it; all else is the one of asyncio or uvloop underneath.

    A close while the client sends makes the kernel reset the connection, and the client may lose an answer
    that it has not read. So the sending side is closed first, and what arrives is discarded for some time.

    Args:
        transport: the one underneath.
        is_client_sending: tells whether more of a request is expected.
    """

    def __init__(self, transport: asyncio.Transport, is_client_sending: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_client_sending = is_client_sending
        self._is_closing = False
        self._left = LINGER_BYTES
        self._ends: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None
        self._num_probed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether nothing can be written any more."""
        return self._is_closing or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Writes a whole head, or what comes behind one."""
        if self.is_closing():
            return
        if self._num_probed and data:
            assert data.startswith(_PROBE), "probes are sent before a head only"
            data, self._num_probed = data[self._num_probed :], 0
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None
        self._transport.write(data)

    def close(self) -> None:
        """Closes the connection, in stages where the client may still send."""
        if self.is_closing():
            return
        self._is_closing = True
        if not self._is_client_sending():
            self.lost()
            self._transport.close()
            return
        loop = asyncio.get_running_loop()
        self._transport.write_eof()
        self._transport.resume_reading()
        self._ends = loop.call_later(LINGER_SECONDS, self.abort)
        self._pause = loop.call_later(LINGER_PAUSE, self.abort)

    def abort(self) -> None:
        """Closes the connection at once."""
        self.lost()
        self._transport.abort()

    def discard(self, size: int) -> None:
        """Takes note of bytes that arrived after the close."""
        self._left -= size
        if self._left < 0:
            self.abort()
        elif self._pause is not None:
            self._pause.cancel()
            self._pause = asyncio.get_running_loop().call_later(LINGER_PAUSE, self.abort)

    def probe(self, is_unanswered: Callable[[], bool]) -> None:
        """Finds out whether a client that stopped sending still reads, or is gone: both look alike.

        The beginning that all answers have is sent, a byte at a time. A kernel whose process closed the
        connection answers the first with a reset, and the next one fails.

        Args:
            is_unanswered: tells whether no answer has begun; after that the answer itself is the probe.
        """
        self._send_probe(is_unanswered, iter(_PROBE_PAUSES))

    def _send_probe(self, is_unanswered: Callable[[], bool], pauses: Iterator[float]) -> None:
        pause = next(pauses, None)
        if pause is None:
            return

        def send() -> None:
            if self.is_closing() or not is_unanswered():
                return
            self._transport.write(_PROBE[self._num_probed : self._num_probed + 1])
            self._num_probed += 1
            self._send_probe(is_unanswered, pauses)

        self._probe = asyncio.get_running_loop().call_later(pause, send)

    def lost(self) -> None:
        """Ends all timers."""
        self._is_closing = True
        for timer in (self._ends, self._pause, self._probe):
            if timer is not None:
                timer.cancel()
