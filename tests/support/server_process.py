"""``penstock serve`` in a separate process, with access to its log, metrics and memory."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx


@dataclass
class ServerProcess:
    """A running server of the demo model."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def worker_pid(self) -> int | None:
        """The process id of the first worker, or None while no worker runs."""
        return next(iter(self.worker_pids), None)

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the running workers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        commands = {int(child): Path(f"/proc/{child}/cmdline").read_text() for child in children}
        return [child for child, line in commands.items() if "json_process" not in line]

    def kill_worker(self) -> int:
        """Kill the first worker and return its process id."""
        worker_pid = self.worker_pid
        assert worker_pid is not None
        os.kill(worker_pid, signal.SIGKILL)
        return worker_pid

    def memory(self, pid: int | None = None) -> int:
        """Return the resident anonymous memory of a process in bytes, by default of the server."""
        status = Path(f"/proc/{pid or self.process.pid}/status").read_text()
        match = re.search(r"RssAnon:\s+(\d+) kB", status)
        assert match is not None
        return 1024 * int(match[1])

    def metrics(self) -> dict[str, float]:
        """Return the values of ``/metrics`` by name and labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in rows}

    def wait_until_idle(self) -> dict[str, float]:
        """Wait up to 60 s until there is no request and no KV cache block is in use. Return the metrics."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            metrics = self.metrics()
            if not any(metrics[name] for name in BUSY_METRICS):
                return metrics
            time.sleep(0.05)
        raise AssertionError({name: metrics[name] for name in BUSY_METRICS})

    def wait_for_status(self, path: str, status: int) -> None:
        """Wait about 60 s at most until a GET request to a path returns a status code."""
        deadline = time.monotonic() + 60
        while (response := httpx.get(self.url + path, timeout=30).status_code) != status:
            assert time.monotonic() < deadline, (path, response)
            time.sleep(0.02)

    def complete(self, **body: Any) -> dict[str, Any]:
        """Return the response to a completion request. Asserts status 200."""
        body = {"model": "demo", "prompt": "Once", "max_tokens": 5, "ignore_eos": True, **body}
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


BUSY_METRICS = (
    "penstock_requests_in_progress",
    "penstock_requests_outstanding",
    "penstock_requests_running",
    "penstock_requests_waiting",
    "penstock_kv_blocks_used",
)


@contextmanager
def server_process(log: Path, *flags: str) -> Iterator[ServerProcess]:
    """Run a server on a free port until the end of the block."""
    command = [sys.executable, "-m", "penstock", "serve", "--model", "demo", "--port", "0", *flags]
    with log.open("wb") as errors, subprocess.Popen(command, stderr=errors) as process:
        try:
            deadline = time.monotonic() + 60
            while (match := re.search(r"serving \S+ at (http://\S+) ", log.read_text())) is None:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
            yield ServerProcess(process, match[1], log)
        finally:
            process.kill()


@dataclass
class RawExchange:
    """A TCP connection to a server, on which tests send and receive bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Return the status code and the headers of the response."""
        status_line, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        return int(status_line.split()[1]), headers

    async def event(self) -> bytes | None:
        """Return the next chunk of a chunked body, or None at its end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        data = await self.reader.readexactly(size + 2)
        return data[:-2] if size else None

    async def body(self, headers: Mapping[str, str]) -> bytes:
        """Return the whole body, with a content length or chunked."""
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        blocks = []
        while (block := await self.event()) is not None:
            blocks.append(block)
        return b"".join(blocks)

    def abort(self) -> None:
        """Reset the connection instead of closing it."""
        self.writer.transport.abort()


def post_head(path: str, length: int | None, **headers: str) -> bytes:
    """Return the head of a POST request."""
    lines = {"host": "localhost", "content-type": "application/json", **headers}
    if length is not None:
        lines["content-length"] = str(length)
    rows = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items())]
    return "\r\n".join([*rows, "", ""]).encode()


@asynccontextmanager
async def raw_exchange(port: int, path: str, body: Any = None) -> AsyncIterator[RawExchange]:
    """Open a connection for the ``with`` block. Send a POST request if a body is given."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    exchange = RawExchange(reader, writer)
    try:
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            exchange.send(post_head(path, len(data)) + data)
        yield exchange
    finally:
        writer.close()
        # A server that has stopped reading never receives the remaining bytes.
        if writer.transport.get_write_buffer_size():
            writer.transport.abort()
        with suppress(OSError):  # the server may have closed the connection
            await writer.wait_closed()
