"""HTTP connections with the parser httptools. This module is imported only if httptools is installed."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.serve.http.connection import MAX_HEAD_SIZE, Connection, check_framing


class HttpToolsConnection(Connection, HttpToolsProtocol):  # type: ignore[misc]
    """A connection that uses the parser httptools, which does not limit the size of headers."""

    _is_in_head = True
    _num_parsed_parts = 0  # number of heads plus number of bodies that have arrived completely
    _head_size = 0  # bytes of an incomplete head, without the bytes that arrived with the previous part

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. Refuse a request whose head is incomplete after `MAX_HEAD_SIZE` bytes."""
        num_parts_before = self._num_parsed_parts
        super().data_received(data)
        if self._num_parsed_parts != num_parts_before:
            self._head_size = 0
        if self._num_parsed_parts != num_parts_before or not self._is_in_head:
            return
        self._head_size += len(data)
        if self._head_size > MAX_HEAD_SIZE and not self.transport.is_closing():
            self._refuse(431, f"the headers of the request are longer than {MAX_HEAD_SIZE} bytes")

    def on_headers_complete(self) -> None:
        """Start processing a request.

        Raises:
            RemoteProtocolError: the framing is ambiguous. httptools converts the exception to a parser error.
        """
        self._is_in_head = False
        self._num_parsed_parts += 1
        check_framing(self.headers, self.parser.get_http_version().encode())
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            # uvicorn has no setting for the class of the cycles that it creates.
            self.cycle.__class__ = _Http10Cycle

    def on_message_complete(self) -> None:
        """Record the end of a request's body."""
        self._is_in_head = True
        self._num_parsed_parts += 1
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the requests of the connection, including pipelined requests."""
        for cycle, _ in self.pipeline:
            cycle.disconnected = True
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return bool(self.pipeline) or super()._is_answering()

    def _drop_incomplete_request(self) -> None:
        if self.pipeline and self.cycle is not None and self.cycle.more_body:
            self.pipeline.popleft()


class _Http10Cycle(RequestResponseCycle):
    """An HTTP/1.0 response. A response without a content length ends when the connection closes."""

    _is_unframed = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self._is_unframed = b"content-length" not in names
            if self._is_unframed:
                self.chunked_encoding = False
        elif self._is_unframed:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)
