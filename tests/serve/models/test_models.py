"""An application that serves several models with fake engines: selection, loading, and shared routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from support.app_client import make_services
from support.engines import FakeEngine

from penstock.config import PipelineConfig
from penstock.errors import CheckpointNotFoundError, ConfigError
from penstock.pipelines.core import PipelineTask
from penstock.serve.models.outer_app import make_outer_app
from penstock.serve.models.registry import ModelRegistry, ServedModel
from penstock.serve.services import Services
from penstock.testing import FakeTokenizer
from penstock.worker.engine_client import EngineClient, SleepLevel


class SlowEngine(FakeEngine):
    """A fake engine whose `wake_up` takes 10 ms. If `load_error` is set, `wake_up` then raises it."""

    load_error: Exception | None = None

    async def wake_up(self) -> None:
        await asyncio.sleep(0.01)
        if self.load_error is not None:
            raise self.load_error
        await super().wake_up()

    async def sleep(self, level: SleepLevel, grace: float) -> None:
        assert not self.num_outstanding
        await super().sleep(level, grace)


def make_served_model(
    name: str, memory: int = 1, engine: EngineClient | None = None, **settings: Any
) -> ServedModel:
    config = PipelineConfig.from_flat({"model_path": "demo", "served_model_name": name, **settings})
    engine = SlowEngine(f"I am {name}", state="asleep") if engine is None else engine
    return ServedModel(config=config, engine=engine, load_tokenizer=FakeTokenizer, memory=memory)


@dataclass
class ApplicationClient:
    """A client of an application with several models."""

    registry: ModelRegistry
    http: httpx.AsyncClient

    async def complete(self, model: str | None = None, **fields: Any) -> httpx.Response:
        body = {"prompt": "Hi", **({} if model is None else {"model": model}), **fields}
        return await self.http.post("/v1/completions", json=body)

    async def complete_text(self, model: str | None = None, **fields: Any) -> str:
        answer = await self.complete(model, **fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def engine_calls(self, name: str) -> list[str]:
        engine = self.registry.find(name, None).engine
        assert isinstance(engine, FakeEngine)
        return engine.calls

    @property
    def loaded_models(self) -> list[str]:
        return [model.name for model in self.registry if model.is_loaded]


@asynccontextmanager
async def open_application(
    *models: ServedModel, budget: int = 1, **config: Any
) -> AsyncIterator[ApplicationClient]:
    async def prepare(model: ServedModel) -> None:
        assert model.engine.state == "ready"

    registry = ModelRegistry(models, budget, prepare, 1)
    services: Services | None = None
    for model in models:
        services = make_services(model.engine, **config) if services is None else services
        services = replace(
            services,
            worker=model.engine,
            pipeline_config=model.config,
            task=model.task,
            tokenizer=FakeTokenizer(),
        )
        model.services = services
        services.metrics.add_engine(model.engine, {"waiting": "waits"}, model.name)
    assert services is not None
    transport = httpx.ASGITransport(make_outer_app(registry))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield ApplicationClient(registry, client)
    services.states.close()
    services.pool.shutdown()
    for decoder in (services.decoder, services.large_body_decoder):
        await decoder.close()


# -- Selection of the model ------------------------------------------------------------------------------


async def test_the_model_field_or_query_parameter_selects_the_model() -> None:
    async with open_application(make_served_model("a"), make_served_model("b"), budget=2) as client:
        assert [await client.complete_text(name) for name in ("a", "b", None)] == [
            "I am a",
            "I am b",
            "I am a",
        ]
        answer = await client.http.post("/v1/completions?model=b", json={"prompt": "Hi"})
        assert answer.json()["choices"][0]["text"] == "I am b"
        chat = {"model": "b", "messages": [{"role": "user", "content": "Hi"}]}
        answer = await client.http.post("/api/chat", json={**chat, "stream": False})
        assert answer.json()["message"]["content"] == "I am b"
        message = {**chat, "max_tokens": 20}
        answer = await client.http.post("/v1/messages", json=message)
        assert answer.json()["content"][0]["text"] == "I am b"


async def test_an_unknown_model_gets_status_404_in_the_format_of_the_api() -> None:
    async with open_application(make_served_model("a"), make_served_model("b"), budget=2) as client:
        answer = await client.complete("c")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert "served are: a, b" in answer.json()["error"]["message"]
        body = {"model": "c", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
        answer = await client.http.post("/v1/messages", json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
        answer = await client.http.post("/v1/embeddings", json={"model": "c", "input": "Hi"})
        assert answer.status_code == 404
        answer = await client.http.post("/api/chat", json=body)
        assert (answer.status_code, "served are" in answer.json()["error"]) == (404, True)
        assert client.loaded_models == []


async def test_a_request_for_an_adapter_goes_to_the_model_of_the_adapter() -> None:
    model_a, model_b = make_served_model("a"), make_served_model("b", enable_lora=True)
    async with open_application(model_a, model_b, budget=2) as client:
        await client.complete_text("b")
        load_body = {"lora_name": "tone", "lora_path": "/tone"}
        answer = await client.http.post("/v1/load_lora_adapter?model=b", json=load_body)
        assert answer.status_code == 200, answer.text
        assert await client.complete_text("tone") == "I am b"
        model_list = (await client.http.get("/v1/models")).json()["data"]
        assert {model["id"]: model["parent"] for model in model_list} == {
            "a": None,
            "b": None,
            "tone": "b",
        }


async def test_requests_without_a_model_go_to_the_first_model_of_the_task() -> None:
    async with open_application(
        make_served_model("a"), make_served_model("e", task="embeddings-generation"), budget=2
    ) as client:
        assert client.registry.find(None, PipelineTask.EMBEDDINGS_GENERATION).name == "e"
        await client.http.post("/v1/embeddings", json={"input": "Hi"})
        assert client.loaded_models == ["e"]
        answer = await client.http.post("/v1/embeddings", json={"model": "a", "input": "Hi"})
        assert answer.status_code == 400
        assert "embeddings" in answer.json()["error"]["message"]


async def test_malformed_bodies_get_the_error_of_the_route() -> None:
    async with open_application(make_served_model("a"), make_served_model("b"), max_body_size=1000) as client:
        client.http.headers["content-type"] = "application/json"
        post = client.http.post
        answer = await post("/v1/completions", content=b"{")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
        for body in (b'{"model": "a\xcb", "prompt": "Hi"}', b'{"\xff": 1}', b"[" * 900):
            answer = await post("/v1/completions", content=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
        assert (await post("/v1/completions", content=b'"' + b"x" * 3000)).status_code == 413
        assert (await client.complete(model=7)).status_code == 400  # type: ignore[arg-type]
        assert (await client.http.get("/nothing")).status_code == 404


# -- Loading ---------------------------------------------------------------------------------------------


async def test_models_are_loaded_on_demand_and_the_least_recently_used_is_unloaded() -> None:
    async with open_application(
        make_served_model("a"), make_served_model("b"), make_served_model("c"), budget=2
    ) as client:
        for name in "abac":
            assert await client.complete_text(name) == f"I am {name}"
        assert client.loaded_models == ["a", "c"]
        assert client.engine_calls("a") == ["wake_up"]
        assert client.engine_calls("b") == ["wake_up", "sleep 2"]
        assert await client.complete_text("b") == "I am b"
        assert client.loaded_models == ["b", "c"]


async def test_loading_a_large_model_unloads_several_models() -> None:
    async with open_application(
        make_served_model("a"), make_served_model("b"), make_served_model("large", memory=2), budget=2
    ) as client:
        for name in ("a", "b", "large"):
            await client.complete_text(name)
        assert client.loaded_models == ["large"]
        await client.complete_text("a")
        assert client.loaded_models == ["a"]


async def test_a_model_in_use_is_not_unloaded() -> None:
    paused_engine = SlowEngine("I am a", state="asleep", is_paused=True)
    async with open_application(
        make_served_model("a", engine=paused_engine), make_served_model("b")
    ) as client:
        first_task = asyncio.create_task(client.complete("a"))
        while not paused_engine.num_outstanding:
            await asyncio.sleep(0)
        other_model_task = asyncio.create_task(client.complete_text("b"))
        await asyncio.sleep(0.05)
        late_task = asyncio.create_task(client.complete("a"))
        await asyncio.sleep(0.05)
        assert (client.loaded_models, other_model_task.done()) == (["a"], False)
        assert len(paused_engine.contexts) == 1  # the late request waits, because b is loaded first
        first_task.cancel()
        assert await other_model_task == "I am b"
        while not paused_engine.num_outstanding:
            await asyncio.sleep(0)
        assert (client.loaded_models, len(paused_engine.contexts)) == (["a"], 2)
        late_task.cancel()


async def test_concurrent_requests_for_two_models_all_succeed() -> None:
    async with open_application(make_served_model("a"), make_served_model("b")) as client:
        names = [name for name in "aabbab" for _ in range(5)]
        texts = await asyncio.wait_for(asyncio.gather(*(client.complete_text(name) for name in names)), 30)
        assert texts == [f"I am {name}" for name in names]


async def test_a_model_that_cannot_be_loaded_fails_only_its_requests() -> None:
    broken_engine = SlowEngine(state="asleep")
    broken_engine.load_error = CheckpointNotFoundError("/b", "does not exist")
    async with open_application(
        make_served_model("a"), make_served_model("b", engine=broken_engine), budget=2
    ) as client:
        assert (await client.complete("b")).status_code >= 400
        assert await client.complete_text("a") == "I am a"
        broken_engine.load_error = None
        assert (await client.complete("b")).status_code == 200


async def test_requests_without_the_key_load_nothing() -> None:
    async with open_application(make_served_model("a"), make_served_model("b"), api_key=("one",)) as client:
        for name in ("b", "c"):
            assert (await client.complete(name)).status_code == 401
        assert client.loaded_models == []
        client.http.headers["authorization"] = "Bearer one"
        assert (await client.complete("c")).status_code == 404


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ((("a", 1), ("a", 1)), "two models have the same name"),
        ((("a", 1), ("b", 2 << 30)), "b needs 2.0 GiB, and all models together may use 1.0 GiB"),
    ],
)
def test_impossible_models_are_refused(models: Any, message: str) -> None:
    async def prepare(model: ServedModel) -> None:
        raise AssertionError

    with pytest.raises(ConfigError, match=message):
        ModelRegistry([make_served_model(name, memory) for name, memory in models], 1 << 30, prepare, 1)


# -- Routes that concern all models ----------------------------------------------------------------------


async def test_all_models_are_listed() -> None:
    async with open_application(make_served_model("a"), make_served_model("b"), budget=2) as client:
        await client.complete_text("a")
        model_list = (await client.http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["max_model_len"]) for model in model_list] == [
            ("a", 2048),
            ("b", 2048),
        ]
        assert (await client.http.get("/v1/models/b")).json()["id"] == "b"
        assert (await client.http.get("/v1/models/c")).status_code == 404
        tags = (await client.http.get("/api/tags")).json()["models"]
        assert [tag["name"] for tag in tags] == ["a", "b"]
        running_models = (await client.http.get("/api/ps")).json()["models"]
        assert [model["name"] for model in running_models] == ["a"]
        assert client.loaded_models == ["a"]


async def test_health_needs_a_loaded_model_and_covers_all_loaded_models() -> None:
    async with open_application(make_served_model("a"), make_served_model("b"), budget=2) as client:
        assert (await client.http.get("/health")).status_code == 503
        await client.complete_text("a")
        await client.complete_text("b")
        assert (await client.http.get("/health")).status_code == 200
        engine = client.registry.find("b", None).engine
        assert isinstance(engine, FakeEngine)
        engine.is_alive, engine.state = False, "restarting"
        answer = await client.http.get("/health")
        assert (answer.status_code, "of b is restarting" in answer.json()["error"]["message"]) == (503, True)
        assert (await client.http.get("/ready")).status_code == 200


async def test_metrics_have_a_model_label() -> None:
    async with open_application(make_served_model("a"), make_served_model("b"), budget=2) as client:
        await client.complete_text("a")
        text = (await client.http.get("/metrics")).text
        assert 'penstock_worker_up{model="a"} 1.0' in text
        assert 'penstock_worker_up{model="b"} 0.0' in text
        assert 'waits{model_name="b"} 0.0' in text
        assert text.count("# TYPE penstock_worker_up ") == 1
        assert 'penstock_requests_total{method="POST",route="/v1/completions",status="200"} 1.0' in text


async def test_sleep_and_wake_up_apply_to_the_named_model() -> None:
    async with open_application(make_served_model("a"), make_served_model("b"), budget=2) as client:
        await client.complete_text("a")
        await client.complete_text("b")
        assert (await client.http.post("/sleep?model=b&level=2")).json() == {"is_sleeping": True}
        assert (await client.http.get("/is_sleeping?model=b")).json() == {"is_sleeping": True}
        assert (await client.http.get("/is_sleeping")).json() == {"is_sleeping": False}
        assert (await client.complete("b")).status_code == 503
        assert (await client.http.post("/wake_up?model=b")).json() == {"is_sleeping": False}
        assert await client.complete_text("b") == "I am b"


async def test_responses_of_all_models_share_a_store() -> None:
    async with open_application(make_served_model("a"), make_served_model("b"), budget=2) as client:
        answer = await client.http.post("/v1/responses", json={"model": "b", "input": "Hi"})
        response_id = answer.json()["id"]
        stored_response = await client.http.get(f"/v1/responses/{response_id}")
        assert json.loads(stored_response.text)["model"] == "b"
