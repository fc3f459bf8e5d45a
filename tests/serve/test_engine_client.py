"""The server with a fake engine client. The server needs only the `EngineClient` protocol."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.app_client import app_client, make_services
from support.asgi import wait_until
from support.engines import FakeEngine

from penstock.serve.warmup import warm_up_text_generation
from penstock.worker.messages import WorkerStats
from penstock.worker.router import WorkerRouter


def make_body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], **fields}


@pytest.mark.parametrize("uses_router", [False, True])
async def test_a_fake_engine_serves_responses_and_streams(uses_router: bool) -> None:
    engine = FakeEngine()
    services = make_services(WorkerRouter([engine]) if uses_router else engine)
    async with app_client(services) as client:
        chat_response = (await client.post("/v1/chat/completions", json=make_body(n=2))).json()
        assert [choice["message"]["content"] for choice in chat_response["choices"]] == ["Hello!", "Hello!"]
        truncated_response = await client.post(
            "/v1/completions", json={"model": "demo", "prompt": "Hi", "max_tokens": 3}
        )
        assert truncated_response.json()["choices"][0]["text"] == "Hel"
        assert truncated_response.json()["choices"][0]["finish_reason"] == "length"
        stream_text = (await client.post("/v1/chat/completions", json=make_body(stream=True))).text
    events = [json.loads(line[6:]) for line in stream_text.split("\n") if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == "Hello!"
    assert (len(engine.contexts), engine.num_outstanding) == (4, 0)


async def test_a_cancelled_request_is_cancelled_at_the_engine() -> None:
    engine = FakeEngine(is_paused=True)
    async with app_client(make_services(engine)) as client:
        task = asyncio.create_task(client.post("/v1/chat/completions", json=make_body(n=2)))
        await wait_until(lambda: len(engine.contexts) == 2)
        task.cancel()
        await asyncio.wait({task})
        await wait_until(lambda: engine.num_outstanding == 0)
    assert engine.cancelled_ids == [context.request_id for context in engine.contexts]


async def test_requests_and_probes_get_503_while_the_engine_restarts() -> None:
    engine = FakeEngine(state="restarting", is_alive=False)
    async with app_client(make_services(engine)) as client:
        refused_response = await client.post("/v1/chat/completions", json=make_body())
        probes = [(await client.get(path)).status_code for path in ("/health", "/ready", "/version")]
    assert (refused_response.status_code, refused_response.json()["error"]["message"]) == (
        503,
        "the engine is restarting",
    )
    assert probes == [503, 503, 200]


async def test_adapters_and_metrics_come_from_the_engine() -> None:
    engine = FakeEngine(stats=WorkerStats(num_steps=7))
    services = make_services(engine)
    services.metrics.add_engine(engine)
    async with app_client(services) as client:
        load_response = await client.post(
            "/v1/load_lora_adapter", json={"lora_name": "tone", "lora_path": "/a"}
        )
        missing_response = await client.post(
            "/v1/load_lora_adapter", json={"lora_name": "other", "lora_path": "/missing"}
        )
        models = (await client.get("/v1/models")).json()["data"]
        metrics = (await client.get("/metrics")).text
    assert (load_response.status_code, missing_response.status_code) == (200, 400)
    assert engine.adapters == {"tone": "/a"}
    assert [model["id"] for model in models][1:] == ["tone"]
    assert models[0]["max_model_len"] == 2048
    assert "penstock_steps_total 7.0" in metrics


async def test_the_warm_up_needs_only_the_engine_client_protocol() -> None:
    engine = FakeEngine()
    await warm_up_text_generation(engine, make_services().tokenizer)
    assert len(engine.contexts) == 3
