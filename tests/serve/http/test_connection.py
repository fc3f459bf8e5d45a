"""HTTP connections, tested with raw bytes: framing, limits, pipelining, half-closed clients and closing."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from penstock.serve.config import ServeConfig
from penstock.serve.http import server as http_server
from penstock.serve.http import transport
from penstock.serve.http.connection import MAX_HEAD_SIZE, H11Connection
from penstock.serve.http.server import HttpServer

GET = b"GET /%b HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /%b HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture(params=["h11", "httptools"], autouse=True)
def _parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "h11":
        monkeypatch.setattr(http_server, "connection_class", lambda: H11Connection)
    else:
        pytest.importorskip("httptools")


class EchoApp:
    """An application that answers with the path and the length of the body.

    Words in the path change the answer. "early" answers 413 without reading the body. "wait" answers after
    `may_continue` is set. "stream" streams a fixed text. "close" adds the header "connection: close".
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.may_continue = asyncio.Event()
        self.num_disconnects = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        self.paths.append(path)
        num_body_bytes = 0
        if "early" not in path:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.num_disconnects += 1
                    return
                num_body_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    break
        if "wait" in path:
            disconnect_task = asyncio.ensure_future(receive())
            continue_task = asyncio.ensure_future(self.may_continue.wait())
            await asyncio.wait((disconnect_task, continue_task), return_when=asyncio.FIRST_COMPLETED)
            continue_task.cancel()
            if disconnect_task.done():
                self.num_disconnects += 1
                return
            disconnect_task.cancel()
        status = 413 if "early" in path else 200
        body = json.dumps({"path": path, "size": num_body_bytes}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if "stream" in path:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for chunk in (b"one", b"two", b""):
                await send({"type": "http.response.body", "body": chunk, "more_body": chunk != b""})
            return
        if "close" in path:
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


@asynccontextmanager
async def run_server(app: Any) -> AsyncIterator[int]:
    """Serve an application and yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with HttpServer(app, ServeConfig()).listening(listener):
            yield listener.getsockname()[1]


async def exchange(port: int, *request_parts: bytes, half_close: bool = False) -> bytes:
    """Send parts of requests with short pauses. Return all bytes received until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for request_part in request_parts:
        writer.write(request_part)
        await asyncio.sleep(0.02)
    if half_close:
        writer.write_eof()
    try:
        async with asyncio.timeout(60):
            return await reader.read()
    finally:
        writer.close()


def parse_responses(data: bytes) -> list[tuple[int, dict[str, Any]]]:
    """Return (status, body) of each response."""
    responses = []
    while data:
        head, _, remainder = data.partition(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:])
        size = int(headers["content-length"])
        responses.append((int(lines[0].split()[1]), json.loads(remainder[:size])))
        data = remainder[size:]
    return responses


async def test_tcp_nodelay_is_set_on_accepted_connections() -> None:
    """With TCP_NODELAY, the operating system sends each write at once."""
    nodelay_flags: list[int] = []

    class NodelayRecorder(EchoApp):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            for connection in server.server_state.connections:
                accepted_socket = connection.transport.get_extra_info("socket")
                nodelay_flags.append(accepted_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            await super().__call__(scope, receive, send)

    server = HttpServer(NodelayRecorder(), ServeConfig())  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with server.listening(listener):
            await exchange(listener.getsockname()[1], GET % b"close")
    assert nodelay_flags == [1]


async def test_a_unix_socket_is_served(tmp_path: Any) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        async with HttpServer(EchoApp(), ServeConfig()).listening(listener):  # type: ignore[arg-type]
            reader, writer = await asyncio.open_unix_connection(tmp_path / "socket")
            writer.write(GET % b"close")
            assert b'"/close"' in await reader.read()
            writer.close()


AMBIGUOUS_OR_INVALID_FRAMING = {
    "length before chunked": b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n1\r\nZ\r\n0\r\n\r\n",
    "chunked before length": b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n1\r\nZ\r\n0\r\n\r\n",
    "two lengths": b"content-length: 4\r\ncontent-length: 5\r\n\r\nabcde",
    "unsupported transfer coding": b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "length with a sign": b"content-length: +4\r\n\r\nabcd",
    "invalid chunk size": b"transfer-encoding: chunked\r\n\r\nZZ\r\n",
}


@pytest.mark.parametrize(
    "framing_and_body", AMBIGUOUS_OR_INVALID_FRAMING.values(), ids=AMBIGUOUS_OR_INVALID_FRAMING.keys()
)
async def test_ambiguous_or_invalid_framing_closes_the_connection(framing_and_body: bytes) -> None:
    app = EchoApp()
    async with run_server(app) as port:
        data = await exchange(port, POST % b"a" + framing_and_body + GET % b"smuggled")
    [(status, body)] = parse_responses(data)
    assert status == 400
    assert body["error"]["code"] == "invalid_http"
    assert b"connection: close" in data
    assert "/smuggled" not in app.paths


async def test_chunked_bodies_are_refused_in_http_1_0() -> None:
    app = EchoApp()
    async with run_server(app) as port:
        requests = b"POST /a HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + GET % b"smuggled"
        data = await exchange(port, requests)
    assert parse_responses(data)[0][0] == 400
    assert "/smuggled" not in app.paths


async def test_chunk_extensions_and_trailers_are_not_part_of_the_body() -> None:
    async with run_server(EchoApp()) as port:
        head = POST % b"a" + b"transfer-encoding: chunked\r\n\r\n"
        requests = head + b'3;name="value"\r\nabc\r\n0;last\r\nx-trailer: 1\r\n\r\n' + GET % b"close"
        responses = parse_responses(await exchange(port, requests))
    assert responses == [(200, {"path": "/a", "size": 3}), (200, {"path": "/close", "size": 0})]


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with run_server(EchoApp()) as port:
        requests = GET % b"1" + POST % b"2" + b"content-length: 3\r\n\r\nabc" + GET % b"3" + GET % b"close"
        responses = parse_responses(await exchange(port, requests))
    assert [body["path"] for _, body in responses] == ["/1", "/2", "/3", "/close"]


async def test_invalid_bytes_after_a_request_are_refused_after_its_response() -> None:
    app = EchoApp()
    async with run_server(app) as port:
        exchange_task = asyncio.ensure_future(exchange(port, GET % b"wait", b"\x00 no HTTP\r\n\r\n"))
        await asyncio.sleep(0.1)
        app.may_continue.set()
        responses = parse_responses(await exchange_task)
    assert [status for status, _ in responses] == [200, 400]


async def test_http_1_0_connections_close_after_the_answer() -> None:
    async with run_server(EchoApp()) as port:
        data = await exchange(port, b"GET /a HTTP/1.0\r\n\r\n")
        keep_alive_data = await exchange(port, b"GET /a HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
    assert parse_responses(data) == parse_responses(keep_alive_data) == [(200, {"path": "/a", "size": 0})]


async def test_http_1_0_responses_are_not_chunked() -> None:
    async with run_server(EchoApp()) as port:
        data = await exchange(port, b"GET /stream HTTP/1.0\r\n\r\n")
    assert data.endswith(b"\r\n\r\nonetwo")
    assert b"chunked" not in data


@pytest.mark.parametrize("is_one_write", [True, False])
async def test_a_too_long_head_is_refused(is_one_write: bool) -> None:
    app = EchoApp()
    request_line = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
    header_lines = [b"x%d: " % number + b"y" * 1000 + b"\r\n" for number in range(MAX_HEAD_SIZE // 500)]
    async with run_server(app) as port:
        data = await exchange(
            port,
            request_line,
            *([b"".join(header_lines)] if is_one_write else [b"".join(header_lines[:80])] * 3),
        )
    [(status, body)] = parse_responses(data)
    assert (status, body["error"]["code"], app.paths) == (431, "invalid_http", [])


async def test_the_head_limit_applies_to_each_request() -> None:
    async with run_server(EchoApp()) as port:
        request = b"GET /a HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 8000 + b"\r\n\r\n"
        responses = parse_responses(await exchange(port, *[request] * 12, GET % b"close"))
    assert len(responses) == 13


async def test_100_continue_is_sent_when_the_body_is_read() -> None:
    async with run_server(EchoApp()) as port:
        head = POST % b"close" + b"content-length: 3\r\nexpect: 100-continue\r\n\r\n"
        data = await exchange(port, head, b"abc")
        early_answer = await exchange(port, head.replace(b"/close", b"/early-close"))
    assert data.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")
    assert early_answer.startswith(b"HTTP/1.1 413")


# -- Clients that close their sending side ---------------------------------------------------------------


async def test_a_half_closed_client_gets_its_answer() -> None:
    async with run_server(EchoApp()) as port:
        responses = parse_responses(await exchange(port, GET % b"a", half_close=True))
        pipelined_responses = parse_responses(await exchange(port, GET % b"1" + GET % b"2", half_close=True))
        data_without_request = await exchange(port, half_close=True)
        idle_responses = parse_responses(await exchange(port, GET % b"a", b"", b"", half_close=True))
    assert [body["path"] for _, body in responses + pipelined_responses + idle_responses] == [
        "/a",
        "/1",
        "/2",
        "/a",
    ]
    assert data_without_request == b""


async def test_a_half_closed_client_can_wait_for_its_answer() -> None:
    """While the client waits, the server sends the first bytes of the answer one by one as probes."""
    app = EchoApp()
    async with run_server(app) as port:
        exchange_task = asyncio.ensure_future(exchange(port, GET % b"wait", half_close=True))
        await asyncio.sleep(0.7)
        app.may_continue.set()
        assert parse_responses(await exchange_task) == [(200, {"path": "/wait", "size": 0})]


async def test_a_disconnect_is_detected_before_the_answer() -> None:
    app = EchoApp()
    async with run_server(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET % b"wait")
        await wait_until(lambda: bool(app.paths))
        writer.close()
        await wait_until(lambda: app.num_disconnects == 1)


async def test_an_incomplete_request_gets_no_answer() -> None:
    app = EchoApp()
    async with run_server(app) as port:
        head = POST % b"a" + b"content-length: 10\r\n\r\nabc"
        assert await exchange(port, head, half_close=True) == b""
        await wait_until(lambda: app.num_disconnects == 1)


# -- Answers before the end of the request ---------------------------------------------------------------


async def test_a_client_that_sends_the_whole_body_before_it_reads_gets_an_early_answer() -> None:
    """Python's http.client sends the whole body before it reads a response."""
    async with run_server(EchoApp()) as port:

        def send() -> tuple[int, bytes]:
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            client.request("POST", "/early-close", body=b"x" * 20_000_000)
            answer = client.getresponse()
            return answer.status, answer.read()

        status, body = await asyncio.to_thread(send)
    assert (status, json.loads(body)["path"]) == (413, "/early-close")


async def test_the_number_of_discarded_bytes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "LINGER_BYTES", 100_000)
    async with run_server(EchoApp()) as port:

        def send() -> int:
            num_sent_bytes = 0
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(POST % b"early-close" + b"content-length: 1000000000\r\n\r\n")
                try:
                    while num_sent_bytes < 100_000_000:
                        num_sent_bytes += client.send(b"x" * 65536)
                except OSError:
                    return num_sent_bytes
            return num_sent_bytes

        assert await asyncio.to_thread(send) < 100_000_000


async def test_the_time_for_discarding_bytes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "LINGER_IDLE_SECONDS", 0.05)
    app = EchoApp()
    server = HttpServer(app, ServeConfig())  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with server.listening(listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(POST % b"early-close" + b"content-length: 1000\r\n\r\n")
            await wait_until(lambda: bool(app.paths))
            await wait_until(lambda: not server.server_state.connections)
            writer.close()


async def test_shutdown_does_not_wait_for_the_body_after_an_early_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "LINGER_IDLE_SECONDS", 60.0)
    app = EchoApp()
    async with run_server(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST % b"early-close" + b"content-length: 1000\r\n\r\n")
        await wait_until(lambda: bool(app.paths))
        start_time = time.monotonic()
    assert time.monotonic() - start_time < transport.LINGER_IDLE_SECONDS
    writer.close()


async def test_a_connection_is_reused_after_an_early_answer() -> None:
    async with run_server(EchoApp()) as port:
        request_parts = POST % b"early" + b"content-length: 1000\r\n\r\n", b"x" * 1000, GET % b"close"
        responses = parse_responses(await exchange(port, *request_parts))
    assert [body["path"] for _, body in responses] == ["/early", "/close"]


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)
