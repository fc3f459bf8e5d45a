"""Ollama's API: chats, generations, embeddings, model lists and descriptions, and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.in_process_server import THINKING, InProcessServer, run_in_process

from penstock.assembly import load_runtime, load_tokenizer
from penstock.config import PipelineConfig
from penstock.serve.api.ollama.ollama_input import _message
from penstock.serve.api.ollama.ollama_schema import OllamaMessage
from penstock.testing import FakePipeline

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def answer_by_script(prompt: str) -> str:
    if "Think" in prompt:
        return "<think>Hm.</think>Yes."
    if "weather?" in prompt and "tool: " not in prompt:
        return 'I look. <tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
    return prompt.split("</tool_call>\n")[-1].removesuffix("assistant: ")


@pytest.fixture
async def server() -> AsyncIterator[InProcessServer]:
    async with run_in_process(
        FakePipeline.answering(answer_by_script), template=THINKING
    ) as in_process_server:
        yield in_process_server


async def post_and_read_lines(server: InProcessServer, path: str, **body: Any) -> list[Any]:
    response = await server.post(path, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


def make_user_message(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


async def test_chat_streams_json_lines_unless_stream_is_false(server: InProcessServer) -> None:
    *text_lines, end_line = await post_and_read_lines(
        server, "/api/chat", messages=make_user_message("Hi"), options={"temperature": 0, "num_ctx": 64}
    )
    assert "".join(line["message"]["content"] for line in text_lines) == "user: Hi"
    assert not any(line["done"] for line in text_lines)
    assert (end_line["done"], end_line["done_reason"], end_line["message"]["content"]) == (True, "stop", "")
    assert end_line["eval_count"] == 9
    assert end_line["prompt_eval_count"] > 8
    assert end_line["total_duration"] > 0
    response = (
        await server.post("/api/chat", messages=make_user_message("Hi"), stream=False, keep_alive="5m")
    ).json()
    assert response["message"] == {"role": "assistant", "content": "user: Hi"}
    assert (response["done"], response["eval_count"], response["model"]) == (True, 9, "demo")
    truncated_response = await server.http.post(
        "/api/chat",
        json={
            "model": "demo:latest",
            "messages": make_user_message("Hi"),
            "stream": False,
            "options": {"num_predict": 2},
        },
    )
    assert (truncated_response.json()["message"]["content"], truncated_response.json()["done_reason"]) == (
        "us",
        "length",
    )
    load_response = (await server.post("/api/chat", messages=[])).json()
    assert load_response["done_reason"] == "load"


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_have_the_ollama_format(server: InProcessServer, stream: bool) -> None:
    fields: Any = {"messages": make_user_message("weather?"), "tools": [WEATHER], "stream": stream}
    if stream:
        streamed_messages = [
            line["message"] for line in await post_and_read_lines(server, "/api/chat", **fields)
        ]
        [calls] = [message["tool_calls"] for message in streamed_messages if "tool_calls" in message]
        content = "".join(message["content"] for message in streamed_messages)
    else:
        message = (await server.post("/api/chat", **fields)).json()["message"]
        calls, content = message["tool_calls"], message["content"]
    assert content == "I look."
    assert calls[0]["function"] == {"index": 0, "name": "get_weather", "arguments": {"city": "Paris"}}
    fields["messages"] += [
        {"role": "assistant", "content": content, "tool_calls": [{"function": calls[0]["function"]}]},
        {"role": "tool", "tool_name": "get_weather", "content": "20"},
    ]
    final_response = await server.post("/api/chat", **{**fields, "stream": False})
    assert final_response.json()["message"]["content"].endswith("tool: 20"), final_response.text


def test_tool_results_without_an_id_belong_to_the_calls_without_a_result() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    pending_call_ids: list[str] = []
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [{"id": "a", **call}, {"id": "b", **call}, {"id": "c", **call}]},
        {"role": "tool", "tool_call_id": "b", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3"},
    ]
    chat_messages = [
        _message(OllamaMessage.model_validate(message), index, pending_call_ids)
        for index, message in enumerate(messages)
    ]
    assert [message["tool_call_id"] for message in chat_messages[1:]] == ["b", "a", "c"]


async def test_thinking_is_a_separate_field(server: InProcessServer) -> None:
    response = (await server.post("/api/chat", messages=make_user_message("Think"), stream=False)).json()
    assert (response["message"]["thinking"], response["message"]["content"]) == ("Hm.", "Yes.")
    without_thinking = (
        await server.post("/api/chat", messages=make_user_message("Think"), stream=False, think=False)
    ).json()
    assert without_thinking["message"] == {"role": "assistant", "content": "Yes."}
    streamed_lines = await post_and_read_lines(server, "/api/generate", prompt="Think", think=True)
    assert "".join(line.get("thinking", "") for line in streamed_lines) == "Hm."
    assert "".join(line["response"] for line in streamed_lines) == "Yes."


async def test_generate_completes_a_prompt_or_only_loads_the_model(server: InProcessServer) -> None:
    *text_lines, end_line = await post_and_read_lines(server, "/api/generate", prompt="Hi", system="S")
    assert "".join(line["response"] for line in text_lines) == "system: Suser: Hi"
    assert (end_line["done_reason"], end_line["response"]) == ("stop", "")
    for think in (None, False):
        raw_response = await server.post("/api/generate", prompt="Hi", raw=True, think=think, stream=False)
        assert raw_response.json()["response"] == "Hi"
    stopped_response = await server.post(
        "/api/generate", prompt="abc", raw=True, stream=False, options={"stop": ["b"]}
    )
    assert stopped_response.json()["response"] == "a"
    assert (await server.post("/api/generate")).json()["done_reason"] == "load"


async def test_formats_without_grammar_support_are_refused_and_a_model_is_described(
    server: InProcessServer,
) -> None:
    for output_format in ({"type": "object"}, "json"):  # the fake model supports no grammars
        refused_response = await server.post(
            "/api/chat", messages=make_user_message("x"), format=output_format
        )
        assert refused_response.json()["error"].startswith("format requires an optional package")
    description = (await server.post("/api/show")).json()
    assert description["capabilities"] == ["completion", "tools", "thinking"]
    assert description["model_info"]["llama.context_length"] == 2048
    assert description["template"] == THINKING


async def test_models_are_listed_and_errors_have_the_ollama_format(server: InProcessServer) -> None:
    [model] = (await server.http.get("/api/tags")).json()["models"]
    assert (model["name"], model["model"]) == ("demo", "demo")
    assert (await server.http.get("/api/ps")).json()["models"][0]["name"] == "demo"
    assert "version" in (await server.http.get("/api/version")).json()
    for path, body, error_text in (
        ("/api/chat", {"model": "other", "messages": make_user_message("x")}, "other"),
        ("/api/chat", {"messages": make_user_message("x"), "colour": 1}, "unknown field 'colour'"),
        (
            "/api/chat",
            {"messages": make_user_message("x"), "options": {"mirostat": 2}},
            "options.mirostat is not",
        ),
        (
            "/api/chat",
            {"messages": make_user_message("x"), "options": {"num_ctx": 10**6}},
            "--max-length 2048",
        ),
        ("/api/chat", {"messages": [{"role": "user", "images": ["aaaa"]}]}, "image"),
        ("/api/chat", {"messages": make_user_message("x"), "think": "high"}, "has no such effort"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "no fill-in-the-middle tokens"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "S"}, "system requires the chat template"),
        ("/api/generate", {"prompt": "x", "context": [1]}, "context is not supported"),
        ("/api/embed", {"input": "x"}, "task"),
        ("/api/show", {"model": "other"}, "other"),
    ):
        refused_response = await server.post(path, **body)
        assert refused_response.status_code in (400, 404), refused_response.text
        assert error_text in refused_response.json()["error"], refused_response.text


async def test_embed_returns_the_vectors_of_the_openai_route_and_truncates_long_inputs(
    embedder: Path,
) -> None:
    config = PipelineConfig.from_flat({"model_path": str(embedder)})
    async with run_in_process(
        make_runtime=partial(load_runtime, config), tokenizer=load_tokenizer(config), pipeline_config=config
    ) as server:
        name = server.services.model_name
        openai_response = await server.http.post("/v1/embeddings", json={"model": name, "input": ["a", "b"]})
        ollama_response = await server.http.post("/api/embed", json={"model": name, "input": ["a", "b"]})
        assert ollama_response.json()["embeddings"] == [
            item["embedding"] for item in openai_response.json()["data"]
        ]
        assert ollama_response.json()["prompt_eval_count"] == openai_response.json()["usage"]["prompt_tokens"]
        long_response = await server.http.post("/api/embed", json={"model": name, "input": "a " * 5000})
        assert len(long_response.json()["embeddings"]) == 1
        assert (await server.http.post("/api/show", json={})).json()["capabilities"] == ["embedding"]
