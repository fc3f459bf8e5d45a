"""The id of the served model in model lists, requests and responses, and routes of another task."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.app_client import app_client, make_services
from support.in_process_server import run_in_process

from penstock.config import PipelineConfig
from penstock.pipelines.core import PipelineTask


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"model_path": "/models/mine"}, "mine"),
        ({"model_path": "./mine/"}, "mine"),
        ({"model_path": "owner/mine"}, "owner/mine"),
        ({"model_path": "/models/mine", "served_model_name": "other"}, "other"),
    ],
)
async def test_the_model_id_is_the_served_name_or_the_hub_id_or_the_folder_name(
    settings: dict[str, str], name: str
) -> None:
    pipeline_config = PipelineConfig.from_flat(settings)
    async with app_client(replace(make_services(), pipeline_config=pipeline_config)) as client:
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["root"]) == (name, settings["model_path"])
        refused_response = await client.post("/v1/completions", json={"prompt": "a", "model": "/models/mine"})
        assert refused_response.status_code == 404
        assert name in refused_response.json()["error"]["message"]


async def test_routes_of_another_task_are_refused() -> None:
    async with app_client(replace(make_services(), task=PipelineTask.EMBEDDINGS_GENERATION)) as client:
        for path in ("/v1/chat/completions", "/v1/chat/completions/render", "/v1/completions"):
            refused_response = await client.post(path, json={"prompt": "a", "messages": []})
            assert refused_response.status_code == 400
            error = refused_response.json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported_task")
            assert error["message"].startswith(f"{path} needs a model of the task text-generation, but")
        assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("model_field", [{}, {"model": "mine"}], ids=str)
async def test_responses_have_the_model_id(model_field: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(PipelineConfig().model.checkpoint)
    config = PipelineConfig.from_flat({"model_path": str(tmp_path / "mine")})
    async with run_in_process(pipeline_config=config) as server:
        answer = await server.http.post("/v1/completions", json={"prompt": "a", **model_field})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "mine"
