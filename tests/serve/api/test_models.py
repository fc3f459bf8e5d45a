"""What a served model is called in lists, requests and answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.chatting import chatting
from support.serving import client_of, make_services

from penstock.config import PipelineConfig


@pytest.mark.parametrize(
    ("flat", "name"),
    [
        ({"model_path": "/models/mine"}, "mine"),
        ({"model_path": "./mine/"}, "mine"),
        ({"model_path": "owner/mine"}, "owner/mine"),
        ({"model_path": "/models/mine", "served_model_name": "other"}, "other"),
    ],
)
async def test_the_id_of_a_local_model_is_its_folder_s_name(flat: dict[str, str], name: str) -> None:
    pipeline_config = PipelineConfig.from_flat(flat)
    async with client_of(replace(make_services(), pipeline_config=pipeline_config)) as client:
        (listed,) = (await client.get("/v1/models")).json()["data"]
        assert (listed["id"], listed["root"]) == (name, flat["model_path"])
        refused = await client.post("/v1/completions", json={"prompt": "a", "model": "/models/mine"})
        assert refused.status_code == 404
        assert name in refused.json()["error"]["message"]


@pytest.mark.parametrize("given", [{}, {"model": "mine"}], ids=str)
async def test_answers_have_the_id(given: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(PipelineConfig().model.checkpoint)
    config = PipelineConfig.from_flat({"model_path": str(tmp_path / "mine")})
    async with chatting(pipeline_config=config) as server:
        answer = await server.http.post("/v1/completions", json={"prompt": "a", **given})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "mine"
