"""HTTP connections: uvicorn's protocols, with the framing and the closing that RFC 9112 asks for.

uvicorn closes a connection at once, when an answer is out and when the client stops sending. Here

    the client stops sending     the answer is still sent, while probes find out whether anybody reads it
    an answer comes early        the rest of the request is read and discarded, then the connection closes
    the framing is ambiguous     400, and the connection closes
    the head is too long         431, and the connection closes
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.serve.http.problems import RequestProblem, problem_of
from penstock.serve.http.transport import ClosingTransport

MAX_HEAD_SIZE = 64 * 1024
"""Bytes of a request's line and headers."""

_REASONS = {400: "Bad Request", 431: "Request Header Fields Too Large", 501: "Not Implemented"}


class Connection(asyncio.Protocol):
    """What both of uvicorn's protocols lack; a class combines it with one of them."""

    seconds_to_begin: float
    """A connection closes unless a request begins within this time."""
    cycle: Any
    """uvicorn's state of the request that was parsed last; None before the first."""
    flow: Any
    transport: ClosingTransport
    _begins: asyncio.TimerHandle | None = None
    _has_ended = False  # the client sends no more
    _is_broken = False  # what it sent is no HTTP
    _refusal: bytes | None = None  # waits for the answers to the requests before it

    # -- What asyncio calls ------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Begins to wait for a request."""
        listener = transport.get_extra_info("socket")
        if listener.family in (socket.AF_INET, socket.AF_INET6):
            # The head and the body of an answer are two writes: the second must not wait for an ACK.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(ClosingTransport(transport, self._is_client_sending))  # type: ignore[arg-type]
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        """Parses what arrives, unless the connection is being closed."""
        if self.transport.is_closing():
            self.transport.discard(len(data))
            return
        if self._is_broken:
            return
        cycle = self.cycle
        super().data_received(data)
        if self.cycle is not cycle:
            self._stop_waiting()
        elif self._begins is None and cycle.response_complete:  # a part of the next one's headers
            self._wait_for_request()

    def eof_received(self) -> bool:
        """Returns whether the connection stays open: a client that only stopped sending gets its answer."""
        self._has_ended = True
        if self.transport.is_closing() or not self._is_answering():
            return False
        self._drop_unfinished()
        self.transport.probe(lambda: not self.cycle.response_started)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends what the connection still runs."""
        self._stop_waiting()  # or the timer would hold what is gone
        self.transport.lost()
        super().connection_lost(exc)

    # -- What uvicorn calls ------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """Goes on with the next request of the connection, if there is one."""
        super().on_response_complete()  # type: ignore[misc]
        if self._is_answering() or self.transport.is_closing():
            return
        if self._refusal is not None:
            self.transport.write(self._refusal)
            self.transport.close()
        elif self._has_ended:
            self.transport.close()

    def shutdown(self) -> None:
        """Closes the connection when its answers are out."""
        if self.transport.is_closing():
            self.transport.abort()
        else:
            super().shutdown()  # type: ignore[misc]

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP, in the shape of all other errors."""
        self._refuse(400, "the request is not valid HTTP")

    # -- Inside ------------------------------------------------------------------------------------------

    def _refuse(self, status: int, message: str) -> None:
        if self._is_broken:
            return
        self._is_broken = True
        body = problem_of(RequestProblem(status, message, code="invalid_http")).encode()
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        refusal = head.encode() + body
        if self._is_answering():  # a request before this one; each connection answers in order
            self._refusal = refusal
            self._drop_unfinished()
            return
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(refusal)
        if cycle is not None and not cycle.response_complete:  # its body is what is broken
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    def _is_answering(self) -> bool:
        """Whether a request that has arrived as a whole is being answered."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def _drop_unfinished(self) -> None:
        """Forgets a pipelined request that will never be whole."""

    def _is_client_sending(self) -> bool:
        """Whether bytes may arrive that nothing reads: a close would reset the connection."""
        if self._is_broken:
            return True
        return self.cycle is not None and (self.cycle.more_body or self.flow.read_paused)

    def _wait_for_request(self) -> None:
        loop = asyncio.get_running_loop()
        self._begins = loop.call_later(self.seconds_to_begin, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._begins is not None:
            self._begins.cancel()
            self._begins = None


class _StrictParser(h11.Connection):
    """h11's parser, without ambiguous framing."""

    status = 400
    """Of the answer to what could not be parsed."""

    def next_event(self) -> Any:
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.status = error.error_status_hint
            raise
        if isinstance(event, h11.Request):
            check_framing(event.headers, event.http_version)
        return event


class H11Connection(Connection, H11Protocol):  # type: ignore[misc]
    """A connection that Python parses."""

    conn: _StrictParser

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _StrictParser(h11.SERVER, MAX_HEAD_SIZE)

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP, or too much of it."""
        if self.conn.status == 431:
            self._refuse(431, f"the head of the request is longer than {MAX_HEAD_SIZE} bytes")
        else:
            super().send_400_response(msg)


def check_framing(headers: Iterable[tuple[bytes, bytes]], http_version: bytes) -> None:
    """Refuses a request whose end a proxy may see in another place (request smuggling).

    Raises:
        RemoteProtocolError: chunks beside a length or in HTTP/1.0, or another transfer coding.
    """
    fields = [(name, value) for name, value in headers if name in (b"content-length", b"transfer-encoding")]
    codings = [value.strip().lower() for name, value in fields if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or len(fields) > 1 or http_version < b"1.1"):
        raise h11.RemoteProtocolError("the framing is ambiguous, or of a transfer coding beside chunked")
