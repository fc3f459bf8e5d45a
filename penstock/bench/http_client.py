"""A small HTTP/1.1 client for load tests, which records when each part of a response arrives.

The client often runs on the machine of the server and competes with the server for CPU time. A
general-purpose client takes more CPU time for a streamed token than a fast server.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec

from penstock.errors import ConfigError

_MAX_HEAD_BYTES = 65536


class IncompleteResponseError(Exception):
    """The connection was closed before the end of the response, or the response is not HTTP."""


@dataclass(slots=True)
class HttpResponse:
    """A response, with arrival times in seconds of ``time.perf_counter``."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """The headers, with names in lower case."""
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    """(arrival time, bytes) of each part of the body: each chunk of a chunked body, or each received block of
    a body that is not chunked."""

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(piece for _, piece in self.pieces)


class HttpClient:
    """Sends requests to one server over reused connections.

    If a reused connection is closed before a response arrives, the request is sent again.

    Args:
        url: the base URL of the server. The path of this URL is a prefix of the path of each request.
        headers: headers to send with each request.

    Raises:
        ConfigError: ``url`` is not a valid HTTP or HTTPS address.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        try:
            url_parts = urlsplit(url)
            port = url_parts.port
        except ValueError as error:
            raise ConfigError("url", f"{url!r} is not an address: {error}") from None
        if url_parts.scheme not in ("http", "https") or url_parts.hostname is None:
            raise ConfigError("url", f"{url!r} is not an address: write http://host:port")
        self._ssl = ssl.create_default_context() if url_parts.scheme == "https" else None
        self._host = url_parts.hostname
        self._port = port or (443 if self._ssl else 80)
        self._path = url_parts.path.rstrip("/")
        all_headers = {"Host": url_parts.netloc.rpartition("@")[2], "Accept": "*/*", **(headers or {})}
        self._header_lines = "".join(f"{name}: {value}\r\n" for name, value in all_headers.items())
        self._idle_connections: list[_Connection] = []

    async def get(self, path: str) -> HttpResponse:
        """Send a GET request and return the response. Raises the errors of `post`."""
        return await self._request(f"GET {self._path}{path} HTTP/1.1\r\n{self._header_lines}\r\n".encode())

    async def post(self, path: str, body: object) -> HttpResponse:
        """Send an object as JSON, or bytes unchanged, and return the response.

        Cancelling the call closes the connection, so that the server cancels the request.

        Raises:
            OSError: the server cannot be reached.
            IncompleteResponseError: the response is incomplete, missing or not HTTP.
        """
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        head = (
            f"POST {self._path}{path} HTTP/1.1\r\n{self._header_lines}"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return await self._request(head.encode() + data)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle_connections:
            self._idle_connections.pop().close()

    async def _request(self, data: bytes) -> HttpResponse:
        while self._idle_connections:
            connection = self._idle_connections.pop()
            if connection.is_open:
                try:
                    return await self._exchange(connection, data)
                except _NoResponseError:
                    pass  # the server closed the idle connection just before it was reused
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        try:
            return await self._exchange(connection, data)
        except _NoResponseError as error:
            raise IncompleteResponseError(str(error)) from None

    async def _exchange(self, connection: _Connection, data: bytes) -> HttpResponse:
        try:
            answer = await connection.exchange(data)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle_connections.append(connection)
        return answer


class _NoResponseError(Exception):
    """The connection was closed before a response arrived."""


class _Connection(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._response = HttpResponse()
        self._response_future: asyncio.Future[HttpResponse] | None = None
        self._has_head = False
        self._is_chunked = False
        self._bytes_left: int | None = None  # None if the body ends when the server closes the connection

    def exchange(self, data: bytes) -> asyncio.Future[HttpResponse]:
        """Send a request and return a future of the response."""
        assert self._transport is not None
        self._response, self._has_head = HttpResponse(), False
        self._response_future = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return self._response_future

    def close(self) -> None:
        """Close the connection at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # -- Called by asyncio -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._buffer += data
        try:
            if not self._has_head:
                self._read_head()
            if self._has_head:
                self._read_body(now)
        except (ValueError, IndexError) as error:
            self._fail(IncompleteResponseError(f"the response is not HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._has_head and not self._is_chunked and self._bytes_left is None:
            self._end()
        elif self._has_head or self._buffer:
            self._fail(IncompleteResponseError("the connection ended in the middle of the response"))
        else:
            self._fail(_NoResponseError("the connection was closed without a response"))

    # -- HTTP --------------------------------------------------------------------------------------------

    def _read_head(self) -> None:
        head_size = self._buffer.find(b"\r\n\r\n")
        if head_size < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                raise ValueError("the response head is too long")
            return
        status_line, *lines = self._buffer[:head_size].decode("latin-1").split("\r\n")
        del self._buffer[: head_size + 4]
        status = int(status_line.split(" ", 2)[1])
        if status < 200:
            return self._read_head()  # an interim response; the final response follows
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        self._response.status, self._response.headers, self._has_head = status, headers, True
        self._is_chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        length = headers.get("content-length")
        self._bytes_left = 0 if self._is_chunked else None if length is None else int(length)

    def _read_body(self, now: float) -> None:
        buffer, pieces = self._buffer, self._response.pieces
        if not self._is_chunked:
            if buffer:
                pieces.append((now, bytes(buffer)))
                if self._bytes_left is not None:
                    self._bytes_left -= len(buffer)
                buffer.clear()
            if self._bytes_left is not None and self._bytes_left <= 0:
                self._end()
            return
        while True:
            line_end = buffer.find(b"\r\n")
            if line_end < 0:
                return
            chunk_size = int(bytes(buffer[:line_end]).partition(b";")[0], 16)
            if len(buffer) < line_end + chunk_size + 4:
                return
            if chunk_size == 0:
                del buffer[: line_end + 4]  # trailers are not supported
                self._end()
                return
            pieces.append((now, bytes(buffer[line_end + 2 : line_end + 2 + chunk_size])))
            del buffer[: line_end + chunk_size + 4]

    def _end(self) -> None:
        if self._response.headers.get("connection", "").lower() == "close":
            self.close()
        if self._response_future is not None and not self._response_future.done():
            self._response_future.set_result(self._response)

    def _fail(self, error: Exception) -> None:
        if self._response_future is not None and not self._response_future.done():
            self._response_future.set_exception(error)
