"""Requests of the AI SDK (`@ai-sdk/openai-compatible`), and the response fields that the SDK reads."""

from __future__ import annotations

import json
from typing import Any

import httpx
from support.in_process_server import parse_events
from support.server_process import ServerProcess

HELLO = {"model": "demo", "max_tokens": 16, "messages": [{"role": "user", "content": "Say hello."}]}
SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}},
    "required": ["city"],
    "additionalProperties": False,
}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
TOOL = {"type": "function", "function": {"name": "weather", "description": "weather", "parameters": SCHEMA}}


def post_chat(server: ServerProcess, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_stream_has_the_text_and_usage_of_a_whole_response(server: ServerProcess) -> None:
    answer = post_chat(server, HELLO)
    assert answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0
    stream_fields = {"stream": True, "stream_options": {"include_usage": True}}
    text = httpx.post(f"{server.url}/v1/chat/completions", json=HELLO | stream_fields, timeout=60).text
    *chunks, end_event = parse_events(text)
    assert end_event == "[DONE]"
    joined_text = "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )
    assert joined_text == answer["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"]["completion_tokens"] == usage["completion_tokens"]


def test_an_object_matches_its_schema(server: ServerProcess) -> None:
    json_schema = {"schema": SCHEMA, "strict": True, "name": "response"}
    body = HELLO | {"max_tokens": 64, "response_format": {"type": "json_schema", "json_schema": json_schema}}
    output = json.loads(post_chat(server, body)["choices"][0]["message"]["content"])
    assert [*output] == ["city"]
    assert len(output["city"]) <= 10


def test_tools_are_called_and_answered(server: ServerProcess) -> None:
    request = {"model": "demo", "max_tokens": 64, "messages": [QUESTION], "tools": [TOOL]}
    [call] = post_chat(server, request | {"tool_choice": "required"})["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert [*json.loads(call["function"]["arguments"])] == ["city"]
    assistant_call = {"id": call["id"], "type": "function", "function": call["function"]}
    later_messages = [
        {"role": "assistant", "content": None, "tool_calls": [assistant_call]},
        {"role": "tool", "tool_call_id": call["id"], "content": json.dumps({"degrees": 18})},
    ]
    answer = post_chat(server, request | {"messages": [QUESTION, *later_messages], "tool_choice": "auto"})
    assert answer["choices"][0]["finish_reason"] in ("stop", "tool_calls", "length")
