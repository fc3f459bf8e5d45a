"""The HTTP client of the load generator, against servers that write given bytes in given chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from penstock.bench.http_client import HttpClient, IncompleteResponseError
from penstock.errors import ConfigError

CONTENT_LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Name: a: b\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 429 Too Many\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
)
UNTIL_CLOSE = b"HTTP/1.0 200 OK\r\n\r\nhello"


@asynccontextmanager
async def open_client_and_server(
    answer: Callable[[bytes, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[tuple[HttpClient, list[bytes]]]:
    """Yield a client and the list of requests that its server has read."""
    received_requests: list[bytes] = []
    server_tasks: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_tasks.add(asyncio.current_task())
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                _, is_post, length = head.partition(b"Content-Length: ")
                body = await reader.readexactly(int(length.split(b"\r\n")[0])) if is_post else b""
                received_requests.append(head + body)
                await answer(head, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/prefix/", {"X-Key": "k"})
    try:
        yield client, received_requests
    finally:
        client.close()
        server.close()
        tasks = [task for task in server_tasks if task is not None]
        for task in tasks:
            task.cancel()
        # The connections must be closed before the event loop ends.
        await asyncio.gather(*tasks, return_exceptions=True)


def respond_with(
    *chunks: bytes, closes_connection: bool = False
) -> Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]:
    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        for chunk in chunks:
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(0.001)
        if closes_connection:
            writer.close()

    return answer


def split_chunks(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(("data", "status"), [(CONTENT_LENGTH, 200), (CHUNKED, 429)])
async def test_a_response_in_chunks_of_any_size_is_read(data: bytes, status: int, size: int) -> None:
    async with open_client_and_server(respond_with(*split_chunks(data, size))) as (client, received_requests):
        for _ in range(2):  # both requests use the same connection
            answer = await client.post("/path", {"a": 1})
            assert (answer.status, answer.body) == (status, b"hello")
        times = [time for time, _ in answer.pieces]
        assert times == sorted(times)
        if data is CONTENT_LENGTH:
            assert answer.headers["x-name"] == "a: b"
        assert received_requests[1].startswith(b"POST /prefix/path HTTP/1.1\r\nHost: 127.0.0.1:")
        assert received_requests[1].endswith(
            b'\r\nContent-Type: application/json\r\nContent-Length: 7\r\n\r\n{"a":1}'
        )
        assert b"\r\nX-Key: k\r\n" in received_requests[1]


async def test_a_response_that_ends_when_the_connection_closes_is_read() -> None:
    async with open_client_and_server(respond_with(UNTIL_CLOSE, closes_connection=True)) as (client, _):
        for _ in range(2):
            assert (await client.get("/")).body == b"hello"


async def test_a_connection_closed_by_the_server_is_reopened() -> None:
    count = 0

    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        if count == 2:
            writer.close()  # the server closes the connection while the client reuses it
        else:
            writer.write(CONTENT_LENGTH)

    async with open_client_and_server(answer) as (client, _):
        assert (await client.get("/")).body == b"hello"
        assert (await client.get("/")).body == b"hello"
        assert count == 3


@pytest.mark.parametrize(
    "chunks",
    [
        [b""],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel"],
        [b"HTTP/1.1 200 OK\r\nContent-Le"],
        [CHUNKED[:-4]],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
        [b"nonsense\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: ten\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000],
    ],
    ids=["nothing", "short", "head", "chunks", "chunk size", "status", "length", "long head"],
)
async def test_an_incomplete_or_malformed_response_is_an_error(chunks: Sequence[bytes]) -> None:
    async with open_client_and_server(respond_with(*chunks, closes_connection=True)) as (client, _):
        with pytest.raises(IncompleteResponseError):
            await client.post("/", {})


async def test_an_unreachable_server_is_an_error() -> None:
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):
        await HttpClient("http://127.0.0.1:9").get("/")


async def test_a_request_that_is_cancelled_closes_its_connection() -> None:
    response_started, client_disconnected = asyncio.Event(), asyncio.Event()

    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        response_started.set()
        try:
            while True:
                writer.write(b"1\r\na\r\n")
                await writer.drain()
                await asyncio.sleep(0.001)
        except ConnectionError:
            client_disconnected.set()
            raise

    async with open_client_and_server(answer) as (client, _):
        task = asyncio.create_task(client.post("/", {}))
        await asyncio.wait_for(response_started.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(client_disconnected.wait(), 30)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", "http://a:port", ""])
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        HttpClient(url)
