"""A transport that closes in stages (RFC 9112, 9.6) and detects disconnected clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

LINGER_BYTES = 64 * 2**20
"""Maximum received bytes to discard after the sending side is closed. More bytes abort the connection."""
LINGER_SECONDS = 30.0
"""Seconds from the closing of the sending side to the abort of the connection."""
LINGER_IDLE_SECONDS = 5.0
"""Seconds without a received byte after which a connection whose sending side is closed is aborted."""

_PROBE = b"HTTP/1.1 "
"""The first bytes of every response, which can be sent before the status code is known."""
_PROBE_PAUSES = (0.05, 0.05, 0.3, 1.0, 4.0, 15.0, 40.0, 120.0, 420.0)
"""Seconds to wait before each byte of `_PROBE`."""


class ClosingTransport:
    """Wraps the transport of asyncio or uvloop for uvicorn's protocol classes.

    If a socket is closed while the client is sending, the kernel resets the connection. The client may then
    lose a response that it has not read yet. If the client may be sending, this transport therefore closes
    the sending side first, and discards received bytes until one of the ``LINGER`` limits is reached.

    Args:
        transport: the wrapped transport.
        is_client_sending: returns whether bytes of the client may be unread or still arrive.
    """

    def __init__(self, transport: asyncio.Transport, is_client_sending: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_client_sending = is_client_sending
        self._is_closing = False
        self._num_linger_bytes_left = LINGER_BYTES
        self._linger_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._num_probe_bytes = 0  # number of bytes of `_PROBE` that have been sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Return whether the transport accepts no more writes."""
        return self._is_closing or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Write response data without the bytes that `probe` has already sent. Does nothing after `close`.

        The first write of a response must begin with its status line.
        """
        if self.is_closing():
            return
        if self._num_probe_bytes and data:
            assert data.startswith(_PROBE), "the first write after a probe begins with the status line"
            data, self._num_probe_bytes = data[self._num_probe_bytes :], 0
        if self._probe_timer is not None:
            self._probe_timer.cancel()
            self._probe_timer = None
        self._transport.write(data)

    def close(self) -> None:
        """Close the connection, in stages if the client may still send."""
        if self.is_closing():
            return
        self._is_closing = True
        if not self._is_client_sending():
            self.cancel_timers()
            self._transport.close()
            return
        loop = asyncio.get_running_loop()
        self._transport.write_eof()
        self._transport.resume_reading()
        self._linger_timer = loop.call_later(LINGER_SECONDS, self.abort)
        self._idle_timer = loop.call_later(LINGER_IDLE_SECONDS, self.abort)

    def abort(self) -> None:
        """Close the connection immediately."""
        self.cancel_timers()
        self._transport.abort()

    def discard(self, num_bytes: int) -> None:
        """Count bytes that arrived after `close`. Abort the connection after more than `LINGER_BYTES`.

        Otherwise restart the idle timer.
        """
        self._num_linger_bytes_left -= num_bytes
        if self._num_linger_bytes_left < 0:
            self.abort()
        elif self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = asyncio.get_running_loop().call_later(LINGER_IDLE_SECONDS, self.abort)

    def probe(self, is_unanswered: Callable[[], bool]) -> None:
        """Start to detect whether a client that has stopped sending has also closed its socket.

        Sends the first bytes that all responses have in common, one byte at a time. If the client has closed
        its socket, the client's kernel answers the first byte with a reset, and the next write fails.

        Args:
            is_unanswered: returns whether no response has started. A started response needs no probe.
        """
        self._send_probe(is_unanswered, iter(_PROBE_PAUSES))

    def _send_probe(self, is_unanswered: Callable[[], bool], pauses: Iterator[float]) -> None:
        pause = next(pauses, None)
        if pause is None:
            return

        def send() -> None:
            if self.is_closing() or not is_unanswered():
                return
            self._transport.write(_PROBE[self._num_probe_bytes : self._num_probe_bytes + 1])
            self._num_probe_bytes += 1
            self._send_probe(is_unanswered, pauses)

        self._probe_timer = asyncio.get_running_loop().call_later(pause, send)

    def cancel_timers(self) -> None:
        """Cancel all timers, and mark the transport as closing."""
        self._is_closing = True
        for timer in (self._linger_timer, self._idle_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
