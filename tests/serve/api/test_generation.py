"""Generation requests: admission, disconnects, errors, time limits, queue limits and slow readers."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from support.asgi import Exchange, wait_until
from support.in_process_server import InProcessServer, parse_events, run_in_process, user_message

from penstock.errors import RequestFailedError
from penstock.pipelines.core import TextContext, TokenGeneratorRequest
from penstock.testing import FakePipeline, FakeTokenizer

CHAT = ("/v1/chat/completions", {"model": "demo", "messages": [user_message("Hi")]})
COMPLETION = ("/v1/completions", {"model": "demo", "prompt": "Hi", "max_tokens": 1500})


def make_endless_pipeline(seconds_per_token: float = 0.001) -> FakePipeline:
    """Return a pipeline that generates the letter a without end."""

    def choose(context: TextContext) -> int:
        time.sleep(seconds_per_token)
        return ord("a")

    return FakePipeline(choose)


def open_exchange(
    server: InProcessServer, route_and_body: tuple[str, dict[str, Any]], **fields: Any
) -> Exchange:
    path, body = route_and_body
    return Exchange(server.app, path, {**body, **fields})  # type: ignore[attr-defined]


async def test_no_headers_are_sent_before_all_choices_are_admitted() -> None:
    async with run_in_process(make_endless_pipeline(), max_batch_size=2) as server:
        running_exchange = open_exchange(server, COMPLETION, stream=True)
        await running_exchange.wait_until_sent(2)
        waiting_exchange = open_exchange(server, CHAT, stream=True, n=2, max_tokens=400)
        await wait_until(lambda: sum(len(batch) == 2 for batch in server.pipeline.batches) > 20)
        assert waiting_exchange.status is None  # the first choice runs, the second choice waits
        running_exchange.disconnect()
        await waiting_exchange.wait_until_sent(2)
        assert waiting_exchange.status == 200
        waiting_exchange.disconnect()
        await running_exchange.wait_until_ended()
        await waiting_exchange.wait_until_ended()


@pytest.mark.parametrize("route_and_body", [CHAT, COMPLETION])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_disconnect_cancels_the_request(
    route_and_body: tuple[str, dict[str, Any]], stream: bool, n: int
) -> None:
    async with run_in_process(make_endless_pipeline(0.005)) as server:
        exchange = open_exchange(server, route_and_body, stream=stream, n=n)
        await wait_until(lambda: len(server.pipeline.batches) > 20)
        exchange.disconnect()
        await exchange.wait_until_ended()
        await wait_until(lambda: server.services.worker.num_outstanding == 0)
        num_steps = len(server.pipeline.batches)
        await asyncio.sleep(0.05)
        assert len(server.pipeline.batches) == num_steps < 1000
        assert b"[DONE]" not in exchange.body
        if not stream:
            assert exchange.status is None
        assert (await server.complete(max_tokens=2))["choices"][0]["text"] == "aa"


async def test_a_disconnect_cancels_a_queued_request() -> None:
    async with run_in_process(make_endless_pipeline(), max_batch_size=1) as server:
        running_exchange = open_exchange(server, COMPLETION, stream=True)
        await running_exchange.wait_until_sent(2)
        for stream in (True, False):
            queued_exchange = open_exchange(server, COMPLETION, stream=stream)
            await wait_until(lambda: server.services.worker.num_outstanding == 2)
            queued_exchange.disconnect()
            await queued_exchange.wait_until_ended()
            await wait_until(lambda: server.services.worker.num_outstanding == 1)
            assert queued_exchange.status is None
        running_exchange.disconnect()
        await running_exchange.wait_until_ended()


async def test_a_stop_string_cancels_the_generation() -> None:
    async with run_in_process(make_endless_pipeline()) as server:
        for stream in (True, False):
            num_steps_before = len(server.pipeline.batches)
            response = await server.post(
                "/v1/completions", prompt="Hi", max_tokens=1500, stop="aaa", stream=stream
            )
            assert response.status_code == 200
            await wait_until(lambda: server.services.worker.num_outstanding == 0)
            assert len(server.pipeline.batches) - num_steps_before < 500


async def test_an_error_ends_a_stream_with_an_error_event_and_without_done() -> None:
    must_fail = threading.Event()

    def choose(context: TextContext) -> int:
        if must_fail.is_set():
            raise RequestFailedError("it broke")
        time.sleep(0.001)
        return ord("a")

    async with run_in_process(FakePipeline(choose)) as server:
        for n in (1, 2):
            must_fail.clear()
            exchange = open_exchange(server, CHAT, stream=True, n=n)
            await exchange.wait_until_sent(8)
            must_fail.set()
            await exchange.wait_until_ended()
            assert exchange.status == 200
            *chunks, error_event = parse_events(exchange.body.decode())
            assert error_event.keys() == {"error"}
            assert error_event["error"].keys() == {"message", "type", "param", "code"}
            assert error_event["error"]["type"] == "server_error"
            assert all("error" not in chunk for chunk in chunks)
            assert server.services.worker.num_outstanding == 0
        response = await server.post("/v1/completions", prompt="Hi")
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        must_fail.clear()
        assert (await server.complete(max_tokens=1))["choices"][0]["text"] == "a"


async def test_the_request_timeout_ends_a_response() -> None:
    async with run_in_process(make_endless_pipeline(0.01), request_timeout=1.5) as server:
        exchange = open_exchange(server, COMPLETION)
        streaming_exchange = open_exchange(server, COMPLETION, stream=True)
        await exchange.wait_until_ended()
        await streaming_exchange.wait_until_ended()
        assert exchange.status == 503
        assert dict(exchange.messages[0]["headers"])[b"retry-after"]
        assert parse_events(streaming_exchange.body.decode())[-1]["error"]["code"] == "timeout"
        await wait_until(lambda: server.services.worker.num_outstanding == 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_stream_timeout_limits_only_the_time_without_tokens(stream: bool) -> None:
    is_blocked = threading.Event()

    def choose(context: TextContext) -> int:
        if len(context.generated_tokens) == 40:
            is_blocked.wait(30)
        time.sleep(0.04)
        return ord("a")

    async with run_in_process(FakePipeline(choose), stream_timeout=1, stream_ping=0.2) as server:
        # The whole response takes 30 x 0.04 s, which is longer than the stream timeout of 1 s.
        exchange = open_exchange(server, COMPLETION, stream=stream, max_tokens=30)
        await exchange.wait_until_ended()
        assert exchange.status == 200
        exchange = open_exchange(server, COMPLETION, stream=stream, max_tokens=60)
        await exchange.wait_until_ended()
        is_blocked.set()
        assert b"no token arrived for 1 seconds" in exchange.body
        assert exchange.status == (200 if stream else 503)
        if stream:
            assert exchange.body.count(b": ping\n\n") >= 2


async def test_a_slow_reader_gets_fewer_and_longer_chunks() -> None:
    async with run_in_process(make_endless_pipeline(0.0005)) as server:
        exchange = open_exchange(server, COMPLETION, stream=True, max_tokens=300)
        await exchange.wait_until_sent(3)
        exchange.may_send.clear()
        await wait_until(lambda: len(server.pipeline.batches) >= 300)
        exchange.may_send.set()
        await exchange.wait_until_ended()
        *chunks, _ = parse_events(exchange.body.decode())
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "a" * 300
        assert len(chunks) < 200
        assert max(len(chunk["choices"][0]["text"]) for chunk in chunks) > 20


async def test_a_response_without_streaming_does_not_wait_for_a_ping() -> None:
    async with run_in_process(make_endless_pipeline(), stream_ping=1000.0) as server:
        answer = await asyncio.wait_for(server.complete(max_tokens=50, n=2), 30)
        assert [choice["text"] for choice in answer["choices"]] == ["a" * 50] * 2


async def test_requests_beyond_the_queue_size_are_refused() -> None:
    async with run_in_process(make_endless_pipeline(), max_batch_size=1, max_queue_size=1) as server:
        error = await server.expect_refusal("/v1/completions", prompt="Hi", n=3)
        assert error["param"] == "n"
        error = await server.expect_refusal("/v1/chat/completions", messages=[user_message("Hi")], n=3)
        assert error["param"] == "n"
        exchanges = [open_exchange(server, COMPLETION, stream=True) for _ in range(2)]
        await wait_until(lambda: server.services.worker.num_outstanding == 2)
        for stream in (True, False):
            response = await server.post("/v1/completions", prompt="Hi", stream=stream)
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "rate_limit_error"
        refused_response = await server.post("/v1/completions", prompt="Hi", n=2)
        assert refused_response.status_code == 429
        assert server.services.worker.num_outstanding == 2
        for exchange in exchanges:
            exchange.disconnect()
            await exchange.wait_until_ended()


async def test_short_prompts_are_not_delayed_by_encoding_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    build_context, may_continue = FakeTokenizer.build_context, threading.Event()

    def build_slowly(self: FakeTokenizer, request: TokenGeneratorRequest, **options: Any) -> TextContext:
        assert len(request.prompt or "") < 1000 or may_continue.wait(60)
        return build_context(self, request, **options)

    monkeypatch.setattr(FakeTokenizer, "build_context", build_slowly)
    async with run_in_process() as server:
        request_fields = {"path": "/v1/completions", "prompt": "a" * 600_000}
        long_requests = [asyncio.ensure_future(server.post(**request_fields)) for _ in range(4)]
        try:
            await asyncio.sleep(0.2)
            async with asyncio.timeout(30):
                assert (await server.complete())["choices"][0]["text"] == "Hello!"
            assert not any(task.done() for task in long_requests)
        finally:
            may_continue.set()
            answers = await asyncio.gather(*long_requests)
        assert [answer.json()["error"]["code"] for answer in answers] == ["context_length_exceeded"] * 4


async def test_streams_finish_while_half_of_the_clients_disconnect() -> None:
    async with run_in_process(make_endless_pipeline(0.0002), max_queue_size=200) as server:
        exchanges = [
            open_exchange(server, COMPLETION, stream=index % 2 == 0, max_tokens=20, n=1 + index % 3 // 2)
            for index in range(60)
        ]
        for index, exchange in enumerate(exchanges):
            if index % 2:
                await asyncio.sleep(0.003)
                exchange.disconnect()
        for exchange in exchanges:
            await exchange.wait_until_ended()
        await wait_until(lambda: server.services.worker.num_outstanding == 0)
        for exchange in exchanges[::2]:
            assert exchange.body.endswith(b"data: [DONE]\n\n")
        assert (await server.complete(max_tokens=2))["choices"][0]["text"] == "aa"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_finished_choice_does_not_affect_the_other_choices(stream: bool) -> None:
    def choose(context: TextContext) -> int:
        time.sleep(0.001)
        must_stop = context.request_id.endswith("-0") and len(context.generated_tokens) == 2
        return ord("b") if must_stop else ord("a")

    async with run_in_process(FakePipeline(choose)) as server:
        body = {"prompt": "Hi", "n": 2, "stop": "b", "max_tokens": 100, "stream": stream}
        response = await server.post("/v1/completions", **body)
        answers = parse_events(response.text)[:-1] if stream else [response.json()]
        reasons, texts = {}, {0: "", 1: ""}
        for choice in (choice for answer in answers for choice in answer["choices"]):
            texts[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
        assert reasons == {0: "stop", 1: "length"}
        assert texts == {0: "aa", 1: "a" * 100}
        steps = [
            batch
            for batch in server.pipeline.batches
            if any(request_id.endswith("-0") for request_id in batch)
        ]
        assert len(steps) < 60  # the worker has cancelled the first choice
