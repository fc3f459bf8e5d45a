"""`PenstockServer` without Ray, and requests to an application in the same process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from support.workers import Gate, GatedPipeline, fake_runtime, letters_in_order

from penstock.errors import ConfigError, UnavailableError, UnsupportedFeatureError
from penstock.ray import llm_server
from penstock.ray.llm_server import PenstockServer, read_llm_config
from penstock.serve.http.internal_request import internal_request
from penstock.testing import FakePipeline
from penstock.worker.client import WorkerClient


class Body:
    """A fake of the pydantic models of requests and responses."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self, **options: Any) -> dict[str, Any]:
        assert options == {"mode": "json", "exclude_unset": True, "exclude_none": True}
        return self.fields

    @classmethod
    def model_validate(cls, fields: dict[str, Any]) -> Body:
        return cls(**fields)


def make_llm_config(**engine_kwargs: Any) -> Any:
    loading = SimpleNamespace(model_id="chat", model_source="demo")
    return SimpleNamespace(
        model_loading_config=loading,
        engine_kwargs=engine_kwargs,
        deployment_config={"max_ongoing_requests": 3},
    )


@asynccontextmanager
async def open_server(pipeline: FakePipeline) -> AsyncIterator[PenstockServer]:
    client = WorkerClient(lambda: fake_runtime(pipeline), in_thread=True)
    server = PenstockServer(make_llm_config(), client)
    await server.reconfigure({})
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture(autouse=True)
def _fake_response_types(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("CompletionResponse", "TokenizeResponse", "ErrorResponse", "ErrorInfo")
    monkeypatch.setattr(
        llm_server, "_response_types", lambda: {name: type(name, (Body,), {}) for name in names}
    )


BODY = {"model": "chat", "prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}


async def test_requests_return_responses_streams_and_errors() -> None:
    async with open_server(FakePipeline(letters_in_order(9))) as server:
        (response,) = [chunk async for chunk in server.completions(Body(**BODY))]
        assert type(response).__name__ == "CompletionResponse"
        assert response.fields["usage"]["completion_tokens"] == 3
        request_info = SimpleNamespace(headers={"X-Request-Id": "abc", "authorization": "Bearer x"})
        events = "".join(
            [chunk async for chunk in server.completions(Body(**BODY, stream=True), request_info)]
        )
        chunks = [json.loads(event[6:]) for event in events.split("\n\n") if event.startswith("data: {")]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == response.fields["choices"][0]["text"]
        assert events.endswith("data: [DONE]\n\n")
        (error_response,) = [chunk async for chunk in server.completions(Body(**{**BODY, "top_p": -1}))]
        assert error_response.fields["error"].fields["code"] == 400
        assert "top_p" in error_response.fields["error"].fields["message"]
        (token_response,) = [chunk async for chunk in server.tokenize(Body(model="chat", prompt="Hello"))]
        assert token_response.fields["count"] == len(token_response.fields["tokens"])
        (unsupported_response,) = [chunk async for chunk in server.transcriptions(Body())]
        assert unsupported_response.fields["error"].fields["message"] == "transcriptions are not supported"


async def test_closing_a_stream_cancels_the_request() -> None:
    gate = Gate()
    pipeline = GatedPipeline(gate, choose=letters_in_order(900))
    async with open_server(pipeline) as server:
        stream = server.completions(Body(**{**BODY, "max_tokens": 800}, stream=True))
        gate.allow_steps(2)
        assert "data: " in await anext(stream)
        await stream.aclose()
        gate.open()
        engine = server._server.engine
        while engine.num_outstanding:
            await asyncio.sleep(0.01)
        assert engine.stats.num_generated_tokens < 800


async def test_a_server_can_sleep_but_not_pause() -> None:
    async with open_server(FakePipeline(letters_in_order(3))) as server:
        await server.check_health()
        await server.reset_prefix_cache()
        await server.sleep(level=1)
        assert await server.is_sleeping()
        (error_response,) = [response async for response in server.completions(Body(**BODY))]
        assert error_response.fields["error"].fields["code"] == 503
        await server.wakeup()
        assert not await server.is_sleeping()
        for call in (server.sleep(level=3), server.wakeup(tags=["x"]), server.pause(), server.resume()):
            with pytest.raises(UnsupportedFeatureError):
                await call
        assert not await server.is_paused()
        assert (await server.llm_config()).model_loading_config.model_id == "chat"
    with pytest.raises(UnavailableError, match="stopped"):
        await server.check_health()


def test_engine_kwargs_become_settings_and_options_and_unknown_names_are_refused() -> None:
    config, serve_config, ray_config = read_llm_config(
        make_llm_config(max_length=64, shutdown_grace=7.0, ray_max_replicas=3)
    )
    assert (config.model.name, config.model.max_length, serve_config.shutdown_grace) == ("chat", 64, 7.0)
    assert ray_config.max_replicas == 3
    options = PenstockServer.get_deployment_options(make_llm_config(ray_cpus=2, tensor_parallel_size=2))
    assert options["max_ongoing_requests"] == 3
    assert options["placement_group_bundles"] == [{"CPU": 2}]
    assert options["user_config"] == {}
    assert "name" not in options
    llm_config = make_llm_config(ray_max_replicas=5)
    llm_config.deployment_config = {"num_replicas": 2}
    assert "autoscaling_config" not in PenstockServer.get_deployment_options(llm_config)
    with pytest.raises(ConfigError, match="max_lenght"):
        read_llm_config(make_llm_config(max_lenght=5))


async def test_an_application_that_fails_raises_its_error() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/late":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise LookupError(scope["path"])

    with pytest.raises(LookupError, match="/early"):
        async with internal_request(fail, "/early", {}, {}, client="test"):
            pass
    async with internal_request(fail, "/late", {}, {}, client="test") as response:
        with pytest.raises(LookupError, match="/late"):
            await response.body()
