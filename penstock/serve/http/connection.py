"""HTTP connections: uvicorn's protocols, with framing and connection closure as RFC 9112 requires.

uvicorn closes a connection immediately when the client stops sending, and after an early response. A response
is early if it is sent before the request has arrived completely. This module replaces this behaviour:

    the client stops sending     the response is sent; probes detect whether the client still reads
    a response is early          the rest of the request is read and discarded, then the connection closes
    the framing is ambiguous     status 400, then the connection closes
    the headers are too long     status 431, then the connection closes
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import Any, Protocol

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.serve.http.problems import RequestProblem, problem_of
from penstock.serve.http.transport import ClosingTransport

MAX_HEAD_SIZE = 64 * 1024
"""Maximum size of a request's first line and headers in bytes."""

_REASONS = {400: "Bad Request", 431: "Request Header Fields Too Large"}


class Cycle(Protocol):
    """uvicorn's state of a request and its response."""

    more_body: bool
    disconnected: bool
    response_started: bool
    response_complete: bool
    message_event: asyncio.Event


class Connection(asyncio.Protocol):
    """Mixin for uvicorn's protocol classes with the behaviour that the module describes."""

    request_start_timeout: float
    """Seconds within which the headers of a request must arrive. After this time, the connection closes."""
    cycle: Cycle | None
    """The last parsed request; None before the first request."""
    flow: FlowControl
    transport: ClosingTransport
    _header_timer: asyncio.TimerHandle | None = None
    _has_received_eof = False
    _has_error = False  # whether the client has sent invalid HTTP
    _pending_refusal: bytes | None = None  # an error response to send after the responses to earlier requests

    # -- Called by asyncio -------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Wrap the transport in a `ClosingTransport`, and start the timer for the first request's headers."""
        client_socket = transport.get_extra_info("socket")
        if client_socket.family in (socket.AF_INET, socket.AF_INET6):
            # The headers and the body of a response are two writes. The second must not wait for an ACK.
            client_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(ClosingTransport(transport, self._is_client_sending))  # type: ignore[arg-type]
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. Discard all bytes while the connection closes and after invalid HTTP."""
        if self.transport.is_closing():
            self.transport.discard(len(data))
            return
        if self._has_error:
            return
        cycle = self.cycle
        super().data_received(data)
        if self.cycle is not cycle:
            self._cancel_header_timer()
        elif self._header_timer is None and (cycle is None or cycle.response_complete):
            self._start_header_timer()  # the next request has begun, and its headers must arrive in time

    def eof_received(self) -> bool:
        """Keep the connection open if a response to a complete request is pending.

        In this case, also drop an incomplete pipelined request, and probe whether the client still reads.
        Return whether the connection stays open.
        """
        self._has_received_eof = True
        if self.transport.is_closing() or not self._is_answering():
            return False
        self._drop_incomplete_request()
        self.transport.probe(self._has_response_to_start)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers of the connection, and end its requests."""
        self._cancel_header_timer()  # a running timer would keep the connection in memory
        self.transport.cancel_timers()
        super().connection_lost(exc)

    # -- Called by uvicorn -------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """Start the next pipelined request if there is one.

        After the last request, send the pending refusal, if any. Close the connection after a refusal, or if
        the client has stopped sending.
        """
        super().on_response_complete()  # type: ignore[misc]
        if self._is_answering() or self.transport.is_closing():
            return
        if self._pending_refusal is not None:
            self.transport.write(self._pending_refusal)
            self.transport.close()
        elif self._has_received_eof:
            self.transport.close()

    def shutdown(self) -> None:
        """Close the connection after its pending responses. Abort it if it is already closing."""
        if self.transport.is_closing():
            self.transport.abort()
        else:
            super().shutdown()  # type: ignore[misc]

    def send_400_response(self, msg: str) -> None:
        """Send a 400 for invalid HTTP, with a body in OpenAI's error format."""
        self._refuse(400, "the request is not valid HTTP")

    # -- Internal ----------------------------------------------------------------------------------------

    def _refuse(self, status: int, message: str) -> None:
        if self._has_error:
            return
        self._has_error = True
        body = problem_of(RequestProblem(status, message, code="invalid_http")).encode()
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        refusal = head.encode() + body
        if self._is_answering():  # responses are sent in the order of the requests
            self._pending_refusal = refusal
            self._drop_incomplete_request()
            return
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(refusal)
        if cycle is not None and not cycle.response_complete:  # invalid bytes in the body of this request
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    def _is_answering(self) -> bool:
        """Return whether a request has arrived completely and its response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def _has_response_to_start(self) -> bool:
        return self.cycle is not None and not self.cycle.response_started

    def _drop_incomplete_request(self) -> None:
        """Remove a pipelined request whose remaining bytes will not arrive. Does nothing in this class."""

    def _is_client_sending(self) -> bool:
        """Return whether bytes from the client may be unread. Closing the socket would then reset the
        connection.
        """
        if self._has_error:
            return True
        return self.cycle is not None and (self.cycle.more_body or self.flow.read_paused)

    def _start_header_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._header_timer = loop.call_later(self.request_start_timeout, self.transport.close)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class _StrictParser(h11.Connection):
    """h11's parser with an additional check for ambiguous framing."""

    status = 400
    """The HTTP status code for the last parser error; 400 before the first error."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.status = error.error_status_hint
            raise
        if isinstance(event, h11.Request):
            check_framing(event.headers, event.http_version)
        return event


class H11Connection(Connection, H11Protocol):  # type: ignore[misc]
    """A connection that uses the parser h11, which is pure Python."""

    conn: _StrictParser

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _StrictParser(h11.SERVER, MAX_HEAD_SIZE)

    def send_400_response(self, msg: str) -> None:
        """Send a 400 for invalid HTTP, or a 431 if the headers are too long."""
        if self.conn.status == 431:
            self._refuse(431, f"the headers of the request are longer than {MAX_HEAD_SIZE} bytes")
        else:
            super().send_400_response(msg)


def check_framing(headers: Iterable[tuple[bytes, bytes]], http_version: bytes) -> None:
    """Raise if a proxy and this server could disagree about where a request ends (request smuggling).

    Raises:
        RemoteProtocolError: the request has both a content length and a transfer coding, a transfer coding in
            HTTP/1.0, or a transfer coding other than a single ``chunked``.
    """
    fields = [(name, value) for name, value in headers if name in (b"content-length", b"transfer-encoding")]
    codings = [value.strip().lower() for name, value in fields if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or len(fields) > 1 or http_version < b"1.1"):
        raise h11.RemoteProtocolError("the framing is ambiguous, or the transfer coding is not chunked")
