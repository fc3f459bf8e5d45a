"""Routes for sleep, reload, the prefix cache and profiles, with a fake engine."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from support.app_client import app_client, make_services
from support.engines import WORKER_INFO, FakeEngine

from penstock.errors import UnsupportedFeatureError

ROUTES = {
    "/sleep": ["sleep 1"],
    "/sleep?level=2": ["sleep 2"],
    "/wake_up": ["wake_up"],
    "/reload": ["reload"],
    "/reset_prefix_cache": ["reset_prefix_cache"],
    "/start_profile": ["start_profile"],
    "/stop_profile": ["stop_profile"],
}


async def post(engine: FakeEngine, path: str, *, headers: Any = None, **config: Any) -> httpx.Response:
    async with app_client(make_services(engine, **config)) as client:
        return await client.post(path, headers=headers)


@pytest.mark.parametrize(("path", "calls"), ROUTES.items())
async def test_each_route_calls_the_engine(path: str, calls: list[str]) -> None:
    engine = FakeEngine()
    assert (await post(engine, path)).status_code == 200
    assert engine.calls == calls


@pytest.mark.parametrize("path", ROUTES)
async def test_each_route_requires_the_api_key_or_a_loopback_address(path: str) -> None:
    engine = FakeEngine()
    assert (await post(engine, path, api_key=("one",))).status_code == 401
    wrong_key = {"authorization": "Bearer two"}
    assert (await post(engine, path, headers=wrong_key, api_key=("one",))).status_code == 401
    refused_response = await post(engine, path, host="0.0.0.0")
    assert (refused_response.status_code, refused_response.json()["error"]["code"]) == (
        403,
        "controls_disabled",
    )
    assert engine.calls == []
    valid_key = {"authorization": "Bearer one"}
    assert (await post(engine, path, headers=valid_key, api_key=("one",), host="0.0.0.0")).status_code == 200


async def test_a_sleeping_server_is_alive_and_not_ready() -> None:
    engine = FakeEngine()
    async with app_client(make_services(engine)) as client:
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
        assert (await client.post("/sleep")).json() == {"is_sleeping": True}
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        body = {"model": "demo", "prompt": "Hi"}
        assert (await client.post("/v1/completions", json=body)).status_code == 503
        assert (await client.post("/wake_up")).json() == {"is_sleeping": False}
        assert (await client.get("/ready")).status_code == 200
        assert (await client.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.parametrize("level", ["0", "3", "x"])
async def test_invalid_sleep_levels_are_refused(level: str) -> None:
    engine = FakeEngine()
    assert (await post(engine, f"/sleep?level={level}")).status_code in (400, 422)
    assert engine.calls == []


async def test_an_unsupported_feature_gives_status_400() -> None:
    engine = FakeEngine(control_error=UnsupportedFeatureError("profiles", "start with --profile-dir"))
    answer = await post(engine, "/start_profile")
    assert answer.status_code == 400
    assert "--profile-dir" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/wake_up", "/reload"])
async def test_the_maximum_length_of_new_workers_applies_after_a_reload_or_a_wake_up(path: str) -> None:
    engine = FakeEngine()
    services = make_services(engine)
    async with app_client(services) as client:
        engine.info = msgspec.structs.replace(WORKER_INFO, max_length=77)
        await client.post(path)
    assert services.tokenizer.max_length == 77
