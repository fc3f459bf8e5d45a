"""Hundreds of streams whose clients disconnect at random times: the server keeps no state for them."""

from __future__ import annotations

import asyncio
import json
import random

from support.server_process import RawExchange, ServerProcess, post_head, raw_exchange

NUM_STREAMS = 200
LENGTH = 120


async def test_two_hundred_streams_with_disconnects(server: ServerProcess) -> None:
    alone = server.complete(temperature=0)["choices"]
    before = server.until_idle()
    draw = random.Random(5)
    ways = [*("stay" for _ in range(20)), *("early", "unsent", "half", "abort", "close") * 36]
    draw.shuffle(ways)
    assert len(ways) == NUM_STREAMS

    async def client(index: int, way: str) -> str:
        await asyncio.sleep(draw.random() * 0.5)
        return await one_stream(server.port, index, way, draw.randrange(1, 40))

    counts = await asyncio.wait_for(asyncio.gather(*map(client, range(NUM_STREAMS), ways)), 90)
    stayed = [count for count, way in zip(counts, ways, strict=True) if way == "stay"]
    assert stayed == [LENGTH] * 20

    metrics = server.until_idle()
    assert metrics["penstock_kv_blocks_cached"] <= metrics["penstock_kv_blocks"]
    assert metrics["penstock_worker_restarts_total"] == before["penstock_worker_restarts_total"]
    left = num_left(metrics) - num_left(before)
    assert left >= 60  # other requests were never read, or were answered before the disconnect
    assert server.complete(temperature=0)["choices"] == alone


def num_left(metrics: dict[str, float]) -> float:
    """Return the number of requests that ended because the client disconnected."""
    name = 'penstock_requests_total{method="POST",route="/v1/completions",status="499"}'
    return metrics.get(name, 0)


async def one_stream(port: int, index: int, way: str, num_events: int) -> int:
    """Run one client. Return the number of tokens in the usage if it reads to the end, otherwise 0."""
    body = {
        "model": "demo",
        "prompt": f"{index} times",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 1,
        "max_tokens": LENGTH,
        "ignore_eos": True,
        "n": 1 if way == "stay" else 1 + index % 3,
    }
    async with raw_exchange(port, "/v1/completions", None if way in ("unsent", "half") else body) as stream:
        if way == "unsent":
            return 0
        if way == "half":
            stream.send(post_head("/v1/completions", 500) + b'{"model": "demo", ')
            await asyncio.sleep(0.05)
            return 0
        if way == "early":
            await asyncio.sleep(num_events / 200)
            stream.abort()
            return 0
        status, headers = await stream.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        if way == "stay":
            return await tokens_of(stream)
        for _ in range(num_events):
            if await stream.event() is None:
                break
        if way == "abort":
            stream.abort()
        return 0


async def tokens_of(stream: RawExchange) -> int:
    """Read a stream to its end and return the number of completion tokens in its usage."""
    blocks = []
    while (block := await stream.event()) is not None:
        blocks.append(block)
    events = [part.removeprefix(b"data: ") for part in b"".join(blocks).split(b"\n\n") if part]
    assert events.pop() == b"[DONE]"
    *chunks, last = map(json.loads, events)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    count: int = last["usage"]["completion_tokens"]
    return count


async def test_whole_responses_after_a_disconnect(server: ServerProcess) -> None:
    before = server.until_idle()

    async def client(index: int) -> None:
        body = {"model": "demo", "prompt": f"{index}", "max_tokens": 400, "ignore_eos": True, "n": 2}
        async with raw_exchange(server.port, "/v1/completions", body) as exchange:
            await asyncio.sleep(0.3 + index % 5 / 20)
            exchange.abort()

    await asyncio.gather(*map(client, range(40)))
    after = server.until_idle()
    generated = "penstock_generated_tokens_total"
    assert after[generated] - before[generated] < 40 * 2 * 400 / 2
    assert server.complete()["usage"]["completion_tokens"] == 5


async def test_connections_that_have_ended_leave_nothing(server: ServerProcess) -> None:
    async def client() -> None:
        async with raw_exchange(server.port, "/v1/completions", {"model": "other"}) as exchange:
            status, headers = await exchange.head()
            await exchange.body(headers)
            assert status == 400

    async def many(count: int) -> None:
        for _ in range(count):
            await asyncio.gather(*(client() for _ in range(20)))

    await many(10)
    before = server.memory()
    await many(100)
    assert server.memory() - before < 10 * 2**20
