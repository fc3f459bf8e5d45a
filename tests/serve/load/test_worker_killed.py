"""The worker process is killed under load: each client gets exactly one error."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from support.server_process import ServerProcess, raw_exchange

PATHS = ("/v1/chat/completions", "/v1/completions")


async def test_each_request_of_a_killed_worker_gets_one_error(server: ServerProcess) -> None:
    expected = server.complete(temperature=0)["choices"]
    before = server.until_idle()["penstock_worker_restarts_total"]
    clients = [asyncio.ensure_future(send_request(server.port, index)) for index in range(60)]
    while server.metrics()["penstock_requests_running"] < 8:
        await asyncio.sleep(0.02)
    killed = server.kill_worker()
    outcomes = await asyncio.wait_for(asyncio.gather(*clients), 60)
    # The killed worker had running and waiting requests.
    assert outcomes.count("error event") >= 1
    assert outcomes.count("503") >= 1
    assert set(outcomes) <= {"error event", "503", "answered"}

    server.until_status("/health", 503)
    for path in PATHS:
        assert await send_request(server.port, 0, path) in ("503", "answered")
    assert httpx.get(f"{server.url}/v1/models").status_code == 200  # routes that need no worker still respond

    await asyncio.to_thread(server.until_status, "/ready", 200)
    await asyncio.to_thread(server.until_status, "/health", 200)
    assert server.worker not in (None, killed)
    assert server.complete(temperature=0)["choices"] == expected
    assert server.until_idle()["penstock_worker_restarts_total"] == before + 1


async def send_request(port: int, index: int, path: str | None = None) -> str:
    """Send a request. Return its outcome: "answered", "503" or "error event"."""
    path, streams = path or PATHS[index % 2], index % 3 > 0
    text = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    body: dict[str, Any] = {"model": "demo", "max_tokens": 400, "ignore_eos": True, **text, "stream": streams}
    async with raw_exchange(port, path, body) as exchange:
        status, headers = await exchange.head()
        data = await exchange.body(headers)
    if status == 503:
        assert int(headers["retry-after"]) >= 1
        check_error(json.loads(data))
        return "503"
    assert status == 200
    if not streams:
        assert json.loads(data)["usage"]["completion_tokens"] == 400
        return "answered"
    *_, last = [part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part]
    if last == b"[DONE]":
        return "answered"
    check_error(json.loads(last))
    assert b"[DONE]" not in data
    return "error event"


def check_error(body: dict[str, Any]) -> None:
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert (body["error"]["type"], body["error"]["code"]) == (
        "service_unavailable_error",
        "service_unavailable",
    )
