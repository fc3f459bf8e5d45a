"""Mixed load, first without and then with killed workers. Memory growth is limited, and requests end."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.server_process import ServerProcess, raw_exchange, server_process

from penstock.serve.api.parameters import UNSUPPORTED

SECONDS = 60
"""Seconds of load with killed workers. Each of the three parts without killed workers takes half as long."""
NUM_CLIENTS = 24
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


async def test_memory_and_results_are_stable_under_mixed_load(tmp_path: Path) -> None:
    # The cache is small, so that all its pages are resident before memory is measured.
    flags = ("--max-length", "512", "--max-queue-size", "20", "--kv-cache-memory", str(32 * 2**20))
    with server_process(tmp_path / "log", *flags) as server:
        expected = server.complete(temperature=0)["choices"]
        memory_sizes, outcomes = [read_memory(server)], Counter[str]()
        for _ in range(3):
            outcomes += await run_clients(server, SECONDS / 2)
            memory_sizes.append(read_memory(server))
        assert outcomes["complete"] > 50
        assert outcomes["streamed"] > 50
        assert outcomes["disconnected"] > 20
        assert outcomes["refused"] > 10
        assert outcomes["broken"] == 0
        # Libraries cache a bounded number of objects per batch shape, so the growth must slow down.
        for first_size, _, size_before, size_after in zip(*memory_sizes, strict=True):
            assert size_after - size_before < (size_before - first_size) / 2 + 16 * 2**20, memory_sizes

        kill_task = asyncio.create_task(kill_worker_repeatedly(server))
        outcomes = await run_clients(server, SECONDS)
        kill_task.cancel()
        await asyncio.wait([kill_task])
        assert kill_task.cancelled()
        assert outcomes["broken"] > 0  # status 503 or an error event
        assert outcomes["complete"] > 10
        await asyncio.to_thread(server.wait_for_status, "/ready", 200)
        metrics = server.wait_until_idle()
        assert metrics["penstock_worker_restarts_total"] >= 2
        assert read_memory(server)[0] < memory_sizes[-1][0] + 48 * 2**20, (
            "the server does not release memory of dead workers"
        )
        assert server.complete(temperature=0)["choices"] == expected
    assert "Traceback" not in (tmp_path / "log").read_text()


def read_memory(server: ServerProcess) -> tuple[int, int]:
    """Return the resident bytes of the server and of its worker when no request runs."""
    server.wait_until_idle()
    assert server.worker_pid is not None
    return server.memory(), server.memory(server.worker_pid)


async def run_clients(server: ServerProcess, seconds: float) -> Counter[str]:
    """Run many clients. Return outcome of `send_random_request` -> number of requests."""
    outcomes: Counter[str] = Counter()
    end_time = time.monotonic() + seconds

    async def run_client(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < end_time:
            outcomes[await asyncio.wait_for(send_random_request(server.port, rng), 60)] += 1
            await asyncio.sleep(rng.random() * 0.05)

    await asyncio.gather(*map(run_client, range(NUM_CLIENTS)))
    return outcomes


async def kill_worker_repeatedly(server: ServerProcess) -> None:
    while True:
        await asyncio.sleep(8)
        await asyncio.to_thread(server.wait_for_status, "/ready", 200)
        server.kill_worker()


async def send_random_request(port: int, rng: random.Random) -> str:
    """Send a random request and return its outcome.

    The outcome is "disconnected" (by this client), "complete" (a response without streaming), "streamed" (a
    complete stream), "broken" (status 503 or an error event) or "refused" (status 400 or 429).
    """
    path, body = draw_body(rng)
    async with raw_exchange(port, path, body) as exchange:
        if rng.random() < 0.1:
            await asyncio.sleep(rng.random() / 5)
            exchange.abort()
            return "disconnected"
        status, headers = await exchange.head()
        if status == 200 and body.get("stream") and rng.random() < 0.3:
            for _ in range(rng.randrange(20)):
                if await exchange.event() is None:
                    break
            exchange.abort()
            return "disconnected"
        data = await exchange.body(headers)
    if status == 200:
        if not body.get("stream"):
            assert len(json.loads(data)["choices"]) == body.get("n", 1)
            return "complete"
        last_event = [event for event in data.split(b"\n\n") if event][-1]
        if last_event == b"data: [DONE]":
            return "streamed"
        assert json.loads(last_event.removeprefix(b"data: "))["error"]["type"] == "service_unavailable_error"
        return "broken"
    assert json.loads(data)["error"].keys() == {"message", "type", "param", "code"}
    if status in (429, 503):
        assert int(headers["retry-after"]) >= 1
        return "broken" if status == 503 else "refused"
    assert status == 400, data
    return "refused"


def draw_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    words = rng.choices(["river", "stone", "Once", "upon", "a", "time", "7", "\n"], k=rng.randrange(1, 60))
    body: dict[str, Any] = {
        "model": "demo",
        "max_tokens": rng.randrange(1, 120),
        "temperature": rng.choice([0, 1]),
        "stream": rng.random() < 0.6,
        "ignore_eos": rng.random() < 0.5,
    }
    for probability, fields in (
        (0.2, {"n": 3}),
        (0.1, {"stop": ["e", "th"]}),
        (0.1, {"presence_penalty": 1, "seed": 5}),
        (0.05, {"logit_bias": {"5": 3}}),
        (0.05, {rng.choice(sorted(UNSUPPORTED_NAMES)): {"x": 1}}),
        (0.05, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}),
    ):
        if rng.random() < probability:
            body |= fields
    if rng.random() < 0.5:
        return "/v1/completions", {**body, "prompt": " ".join(words)}
    body |= {"tools": [TOOL]} if rng.random() < 0.2 and "response_format" not in body else {}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": " ".join(words)}]}


UNSUPPORTED_NAMES = {name for fields in UNSUPPORTED.values() for name in fields}
