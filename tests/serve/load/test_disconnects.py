"""Many clients disconnect: their requests end, and the streams of the remaining clients are complete."""

from __future__ import annotations

import asyncio
import json
import random

from support.server_process import RawExchange, ServerProcess, post_head, raw_exchange

NUM_STREAMS = 200
NUM_NEW_TOKENS = 120


async def test_streams_of_connected_clients_are_complete_while_others_disconnect(
    server: ServerProcess,
) -> None:
    single_choices = server.complete(temperature=0)["choices"]
    metrics_before = server.wait_until_idle()
    rng = random.Random(5)
    behaviours = [*("stay" for _ in range(20)), *("early", "unsent", "half", "abort", "close") * 36]
    rng.shuffle(behaviours)
    assert len(behaviours) == NUM_STREAMS

    async def wait_and_run_client(index: int, behaviour: str) -> str:
        await asyncio.sleep(rng.random() * 0.5)
        return await run_client(server.port, index, behaviour, rng.randrange(1, 40))

    token_counts = await asyncio.wait_for(
        asyncio.gather(*map(wait_and_run_client, range(NUM_STREAMS), behaviours)), 90
    )
    complete_counts = [
        count for count, behaviour in zip(token_counts, behaviours, strict=True) if behaviour == "stay"
    ]
    assert complete_counts == [NUM_NEW_TOKENS] * 20

    metrics = server.wait_until_idle()
    assert metrics["penstock_kv_blocks_cached"] <= metrics["penstock_kv_blocks"]
    assert metrics["penstock_worker_restarts_total"] == metrics_before["penstock_worker_restarts_total"]
    num_new_disconnects = num_disconnected(metrics) - num_disconnected(metrics_before)
    # 180 clients disconnect. A disconnect is not counted if the server has read no request, or if the
    # response is complete.
    assert num_new_disconnects >= 60
    assert server.complete(temperature=0)["choices"] == single_choices


def num_disconnected(metrics: dict[str, float]) -> float:
    """Return the number of requests that ended because the client disconnected."""
    name = 'penstock_requests_total{method="POST",route="/v1/completions",status="499"}'
    return metrics.get(name, 0)


async def run_client(port: int, index: int, behaviour: str, num_events: int) -> int:
    """Run a client. Return the number of completion tokens if it reads the whole stream, otherwise 0.

    Args:
        port: the port of the server.
        index: the number of the client, which is part of its prompt.
        behaviour: "stay" reads the whole stream. "unsent" connects and sends nothing. "half" sends a part of
            a request. "early" resets the connection without reading. "abort" resets the connection after
            `num_events` events. "close" closes the connection after `num_events` events.
        num_events: the number of events to read. "early" waits 5 ms per event.
    """
    body = {
        "model": "demo",
        "prompt": f"{index} times",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 1,
        "max_tokens": NUM_NEW_TOKENS,
        "ignore_eos": True,
        "n": 1 if behaviour == "stay" else 1 + index % 3,
    }
    async with raw_exchange(
        port, "/v1/completions", None if behaviour in ("unsent", "half") else body
    ) as stream:
        if behaviour == "unsent":
            return 0
        if behaviour == "half":
            stream.send(post_head("/v1/completions", 500) + b'{"model": "demo", ')
            await asyncio.sleep(0.05)
            return 0
        if behaviour == "early":
            await asyncio.sleep(num_events / 200)
            stream.abort()
            return 0
        status, headers = await stream.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        if behaviour == "stay":
            return await read_usage(stream)
        for _ in range(num_events):
            if await stream.event() is None:
                break
        if behaviour == "abort":
            stream.abort()
        return 0


async def read_usage(stream: RawExchange) -> int:
    """Read a stream to its end. Return the number of completion tokens in its usage."""
    blocks = []
    while (block := await stream.event()) is not None:
        blocks.append(block)
    events = [event.removeprefix(b"data: ") for event in b"".join(blocks).split(b"\n\n") if event]
    assert events.pop() == b"[DONE]"
    *chunks, usage_chunk = map(json.loads, events)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    count: int = usage_chunk["usage"]["completion_tokens"]
    return count


async def test_a_disconnect_ends_a_generation_without_streaming(server: ServerProcess) -> None:
    metrics_before = server.wait_until_idle()

    async def send_and_abort(index: int) -> None:
        body = {"model": "demo", "prompt": f"{index}", "max_tokens": 400, "ignore_eos": True, "n": 2}
        async with raw_exchange(server.port, "/v1/completions", body) as exchange:
            await asyncio.sleep(0.3 + index % 5 / 20)
            exchange.abort()

    await asyncio.gather(*map(send_and_abort, range(40)))
    metrics_after = server.wait_until_idle()
    metric_name = "penstock_generated_tokens_total"
    assert metrics_after[metric_name] - metrics_before[metric_name] < 40 * 2 * 400 / 2
    assert server.complete()["usage"]["completion_tokens"] == 5


async def test_closed_connections_do_not_increase_the_memory(server: ServerProcess) -> None:
    async def send_invalid_request() -> None:
        async with raw_exchange(server.port, "/v1/completions", {"model": "other"}) as exchange:
            status, headers = await exchange.head()
            await exchange.body(headers)
            assert status == 400

    async def open_and_close(num_rounds: int) -> None:
        for _ in range(num_rounds):
            await asyncio.gather(*(send_invalid_request() for _ in range(20)))

    await open_and_close(10)
    bytes_before = server.memory()
    await open_and_close(100)
    assert server.memory() - bytes_before < 10 * 2**20
