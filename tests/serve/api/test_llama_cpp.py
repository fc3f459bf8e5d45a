"""The routes ``/completion`` and ``/infill`` of llama.cpp's server."""

from __future__ import annotations

from typing import Any

import pytest
from support.in_process_server import parse_events, run_in_process

from penstock.serve.api import fill_in_middle
from penstock.serve.api.fill_in_middle import FillInMiddleTokens
from penstock.testing import FakePipeline


def make_echo_pipeline() -> FakePipeline:
    return FakePipeline.answering(lambda prompt: prompt)


async def test_the_completion_route_answers_in_the_format_of_llama_cpp() -> None:
    async with run_in_process(make_echo_pipeline()) as server:
        response = (
            await server.http.post("/completion", json={"prompt": "Hello", "return_tokens": True})
        ).json()
        assert (response["content"], response["stop_type"], response["stop"]) == ("Hello", "eos", True)
        assert response["tokens"] == list(b"Hello")
        assert (response["tokens_evaluated"], response["tokens_predicted"], response["model"]) == (
            5,
            6,
            "demo",
        )
        assert response["timings"]["predicted_n"] == 6
        stopped_response = await server.post("/completion", prompt="Hello", stop=["l"], n_predict=-1, seed=-1)
        assert (
            stopped_response.json()["content"],
            stopped_response.json()["stop_type"],
            stopped_response.json()["stopping_word"],
        ) == (
            "He",
            "word",
            "l",
        )
        truncated_response = await server.post(
            "/completion", prompt=list(b"Hello"), n_predict=2, cache_prompt=False
        )
        assert (truncated_response.json()["content"], truncated_response.json()["stop_type"]) == (
            "He",
            "limit",
        )
        *text_events, end_event = parse_events(
            (await server.post("/completion", prompt="Hello", stream=True)).text
        )
        assert "".join(item["content"] for item in text_events) == "Hello"
        assert not any(item["stop"] for item in text_events)
        assert (end_event["stop"], end_event["content"], end_event["stop_type"]) == (True, "", "eos")


async def test_the_infill_route_formats_the_prompt_and_needs_infill_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run_in_process(make_echo_pipeline()) as server:
        fields: Any = {"input_prefix": "ab", "input_suffix": "cd", "n_predict": 50}
        assert (await server.expect_refusal("/infill", **fields))["param"] == "input_suffix"
        monkeypatch.setattr(fill_in_middle, "FIM_FAMILIES", (FillInMiddleTokens("^", "~", "|"),))
        response = await server.post("/infill", **fields)
        assert response.json()["content"] == "^ab~cd|"
        extra_files = [{"filename": "f", "text": "t"}]
        response = await server.post("/infill", **fields, input_extra=extra_files, prompt="x")
        assert response.json()["content"] == "^f\nt\nabx~cd|"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/completion", {}, "prompt"),
        ("/completion", {"prompt": "x", "mirostat": 2}, "mirostat"),
        ("/completion", {"prompt": "x", "colour": 2}, "colour"),
        ("/completion", {"prompt": "x", "samplers": ["top_k"]}, "samplers"),
        ("/completion", {"prompt": "x", "repeat_penalty": 0}, "repeat_penalty"),
        ("/completion", {"prompt": "x", "json_schema": {}}, "json_schema"),
        ("/completion", {"prompt": "x", "json_schema": {}, "grammar": "x"}, "grammar"),
        ("/completion", {"prompt": "x" * 3000}, "prompt"),
        ("/infill", {"input_prefix": "a", "input_suffix": ""}, "input_suffix"),
        ("/infill", {"input_prefix": "a"}, "input_suffix"),
    ],
)
async def test_missing_unknown_and_invalid_fields_are_refused_with_their_names(
    path: str, body: dict[str, Any], param: str
) -> None:
    async with run_in_process() as server:
        assert (await server.expect_refusal(path, **body))["param"] == param
