"""Loading and unloading of adapters over HTTP, with a fake worker that stores only names and paths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.app_client import app_client, make_services
from support.engines import FakeEngine

from penstock.config import PipelineConfig
from penstock.errors import UnknownModelError, WeightsError
from penstock.serve.services import Services


@dataclass
class Worker(FakeEngine):
    """A fake worker that stores the paths of adapters. Loading fails if the path contains ``broken``."""

    async def load_adapter(self, name: str, path: str) -> None:
        if "broken" in path:
            raise WeightsError(path, "2 missing: a, b")
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise UnknownModelError(name, self.adapters)


def make_lora_services(lora: dict[str, Any] | None = None, **config: Any) -> Services:
    values = {"model_path": "demo", **({"enable_lora": True} if lora is None else lora)}
    return replace(make_services(Worker(), **config), pipeline_config=PipelineConfig.from_flat(values))


async def post(services: Services, route: str, **kwargs: Any) -> httpx.Response:
    headers = kwargs.pop("headers", {})
    async with app_client(services) as client:
        return await client.post(f"/v1/{route}_lora_adapter", json=kwargs, headers=headers)


@pytest.mark.anyio
async def test_an_adapter_is_loaded_listed_reloaded_and_unloaded() -> None:
    async with app_client(make_lora_services()) as client:
        load = {"lora_name": "tone", "lora_path": "/adapters/one"}
        answer = await client.post("/v1/load_lora_adapter", json=load)
        assert (answer.status_code, answer.text) == (200, "The adapter 'tone' is loaded.")
        models = {item["id"]: item for item in (await client.get("/v1/models")).json()["data"]}
        assert models["tone"]["root"] == "/adapters/one"
        assert models["tone"]["parent"] == "demo"
        reload = await client.post("/v1/load_lora_adapter", json={**load, "lora_path": "/adapters/two"})
        assert reload.text == "The adapter 'tone' is reloaded."
        refused_response = await client.post("/v1/load_lora_adapter", json={**load, "load_inplace": False})
        assert refused_response.status_code == 409
        answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": "tone"})
        assert (answer.status_code, answer.text) == (200, "The adapter 'tone' is unloaded.")
        answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": "tone"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.anyio
async def test_the_error_of_a_failed_load_is_returned() -> None:
    answer = await post(make_lora_services(), "load", lora_name="tone", lora_path="/broken")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "/broken: 2 missing: a, b"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "tone"}, "lora_path"),
        ({"lora_path": "/a"}, "lora_name"),
        ({"lora_name": "", "lora_path": "/a"}, "lora_name"),
        ({"lora_name": "tone", "lora_path": "/a\0b"}, "lora_path"),
        ({"lora_name": "tone", "lora_path": "/a", "lora_int_id": 1}, "lora_int_id"),
    ],
)
async def test_an_invalid_body_is_refused_with_the_name_of_the_field(
    body: dict[str, Any], param: str
) -> None:
    answer = await post(make_lora_services(), "load", **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.anyio
async def test_the_name_of_the_model_is_refused_as_adapter_name() -> None:
    answer = await post(make_lora_services(), "load", lora_name="demo", lora_path="/a")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "name_in_use")


@pytest.mark.anyio
@pytest.mark.parametrize("route", ["load", "unload"])
@pytest.mark.parametrize(
    ("lora", "config", "status"),
    [
        ({}, {}, 403),
        ({"lora": ("tone=/a",)}, {}, 403),  # this server loads adapters only at start-up
        (None, {"host": "0.0.0.0"}, 403),
        (None, {"host": "::1"}, 200),
        (None, {"host": "localhost"}, 200),
        (None, {"host": "0.0.0.0", "api_key": ("secret",)}, 200),
    ],
)
async def test_adapter_routes_need_enable_lora_and_a_local_host_or_an_api_key(
    route: str, lora: dict[str, Any] | None, config: dict[str, Any], status: int
) -> None:
    body = {"lora_name": "tone", **({"lora_path": "/a"} if route == "load" else {})}
    headers = {"authorization": "Bearer secret"} if "api_key" in config else {}
    services = make_lora_services(lora, **config)
    services.worker.adapters["tone"] = "/a"
    answer = await post(services, route, headers=headers, **body)
    assert answer.status_code == status


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path_template", "is_allowed"),
    [
        ("tone", True),
        ("./deep/tone", True),
        ("{root}/tone", True),
        ("../outside", False),
        ("tone/../../outside", False),
        ("/etc", False),
        ("link", False),
        ("{root}-other", False),
    ],
)
async def test_adapter_paths_must_be_in_the_configured_directory(
    path_template: str, is_allowed: bool, tmp_path: Path
) -> None:
    root = tmp_path / "adapters"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    services = make_lora_services({"enable_lora": True, "lora_dir": str(root)})
    path = path_template.format(root=root)
    answer = await post(services, "load", lora_name="tone", lora_path=path)
    assert answer.status_code == (200 if is_allowed else 403)
    expected = {"tone": str((root / path).resolve())} if is_allowed else {}
    assert services.worker.adapters == expected
