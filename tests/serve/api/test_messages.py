"""Anthropic's Messages API with the official client, against a server with a scripted model."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.in_process_server import THINKING, run_in_process
from support.live_server import live_server

from penstock.testing import FakePipeline

anthropic: Any = pytest.importorskip("anthropic", reason="needs the package anthropic")

WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = 'I look. <tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


def answer_by_script(prompt: str) -> str:
    """Return the answer to a known text in the prompt, or else the prompt without a final ``assistant: ``."""
    if "Say hello" in prompt:
        return "Hello!"
    if "Think" in prompt:
        return "<think>Hm.</think>Yes."
    if "weather?" in prompt:
        return (
            f"It is {prompt.split('tool: ')[1].removesuffix('assistant: ')}." if "tool: " in prompt else CALL
        )
    return prompt.removesuffix("assistant: ")


def make_user_message(text: Any) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live_server(pipeline=FakePipeline.answering(answer_by_script), template=THINKING) as server:
        yield server.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as anthropic_client:
        yield anthropic_client


def test_create_returns_a_message(client: Any) -> None:
    message = client.messages.create(model="demo", max_tokens=50, messages=make_user_message("Say hello"))
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello!"}]
    assert (message.role, message.model, message.stop_reason) == ("assistant", "demo", "end_turn")
    usage = message.usage
    assert usage.output_tokens == 7
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) > 10
    count = client.messages.count_tokens(model="demo", messages=make_user_message("Say hello"))
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_the_whole_conversation_is_rendered_by_the_template(client: Any) -> None:
    messages = [
        *make_user_message([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "see"},
                {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Rome"}},
            ],
        },
        *make_user_message(
            [
                {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"},
                {"type": "tool_result", "tool_use_id": "c2", "is_error": True, "content": "no"},
                {"type": "text", "text": "So?"},
                {
                    "type": "document",
                    "title": "T",
                    "source": {"type": "text", "data": "D", "media_type": "text/plain"},
                },
            ]
        ),
    ]
    message = client.messages.create(
        model="demo", max_tokens=500, system=[{"type": "text", "text": "S"}], messages=messages
    )
    assert message.content[0].text == (
        'system: Suser: a\nbassistant: see<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}'
        "</tool_call>tool: sunnytool: Error: nouser: So?\nT\n\nD"
    )


def test_the_output_continues_a_final_assistant_message(client: Any) -> None:
    messages = [*make_user_message("x"), {"role": "assistant", "content": "The answer"}]
    message = client.messages.create(model="demo", max_tokens=50, messages=messages)
    assert message.content[0].text == "user: xassistant: The answer"


@pytest.mark.parametrize("stream", [False, True])
def test_responses_and_streams_contain_tool_calls(client: Any, stream: bool) -> None:
    fields: Any = {
        "model": "demo",
        "max_tokens": 200,
        "messages": make_user_message("weather?"),
        "tools": [WEATHER],
    }
    if stream:
        with client.messages.stream(**fields) as events:
            names = [event.type for event in events]
            message = events.get_final_message()
        assert [name for name in names if not name.endswith("delta")] == [
            "message_start",
            "content_block_start",
            *["text"] * names.count("text"),
            "content_block_stop",
            "content_block_start",
            *["input_json"] * names.count("input_json"),
            "content_block_stop",
            "message_stop",
        ]
    else:
        message = client.messages.create(**fields)
    text, call = message.content
    assert (text.text, call.name, call.input) == ("I look.", "get_weather", {"city": "Paris"})
    assert message.stop_reason == "tool_use"
    tool_result_messages = [
        {"role": "assistant", "content": message.content},
        *make_user_message(
            [{"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "20"}]}]
        ),
    ]
    final_message = client.messages.create(
        **{**fields, "max_tokens": 500, "messages": [*fields["messages"], *tool_result_messages]}
    )
    assert final_message.content[0].text == "It is 20."


def test_thinking_is_returned_in_its_own_block(client: Any, url: str) -> None:
    fields: Any = {"model": "demo", "max_tokens": 2000, "messages": make_user_message("Think")}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    message = client.messages.create(**fields, thinking=thinking)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == ("Hm.", "Yes.")
    assert message.content[0].signature
    message_with_omitted_thinking = client.messages.create(
        **fields, thinking={"type": "adaptive", "display": "omitted"}
    )
    assert (
        message_with_omitted_thinking.content[0].thinking,
        message_with_omitted_thinking.content[1].text,
    ) == ("", "Yes.")
    with client.messages.stream(**fields, thinking=thinking) as events:
        streamed_message = events.get_final_message()
    assert [block.to_dict() for block in streamed_message.content] == [
        block.to_dict() for block in message.content
    ]
    raw_response = httpx.post(f"{url}v1/messages", json={**fields, "stream": True}).text
    first_event, *_, last_event = raw_response.strip().split("\n\n")
    assert first_event.startswith('event: message_start\ndata: {"type":"message_start","message":{"id":"msg_')
    assert last_event == 'event: message_stop\ndata: {"type":"message_stop"}'
    delta = json.loads(raw_response.split("event: message_delta\ndata: ")[1].split("\n")[0])
    assert delta["usage"]["output_tokens"] == message.usage.output_tokens


def test_each_end_of_an_output_has_its_stop_reason(client: Any) -> None:
    fields: Any = {"model": "demo", "messages": make_user_message("Say hello")}
    truncated_response = client.messages.create(**fields, max_tokens=2)
    assert (truncated_response.content[0].text, truncated_response.stop_reason) == ("He", "max_tokens")
    stopped_message = client.messages.create(**fields, max_tokens=50, stop_sequences=["x", "lo"])
    assert (stopped_message.content[0].text, stopped_message.stop_reason, stopped_message.stop_sequence) == (
        "Hel",
        "stop_sequence",
        "lo",
    )
    full_context_message = client.messages.create(
        model="demo", max_tokens=5000, messages=make_user_message("y" * 1500)
    )
    assert full_context_message.stop_reason == "model_context_window_exceeded"


async def test_the_asynchronous_client_streams(url: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, auth_token="none", max_retries=0) as client:
        async with client.messages.stream(
            model="demo", max_tokens=50, messages=make_user_message("Say hello")
        ) as stream:
            assert "".join([text async for text in stream.text_stream]) == "Hello!"
        beta_message = await client.beta.messages.create(
            model="demo",
            max_tokens=50,
            messages=make_user_message("Say hello"),
            betas=["context-1m-2025-08-07"],
        )
        assert beta_message.content[0].text == "Hello!"


def test_errors_have_the_format_of_the_messages_api(client: Any, url: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="claude-9") as unknown_error:
        client.messages.create(model="claude-9", max_tokens=5, messages=make_user_message("x"))
    assert unknown_error.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\] has the type 'video'"):
        client.messages.create(model="demo", max_tokens=5, messages=make_user_message([{"type": "video"}]))
    error = httpx.post(f"{url}v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert error.status_code == 400
    assert error.json()["type"] == "error"
    assert error.json()["error"]["type"] == "invalid_request_error"
    assert error.json()["request_id"] == error.headers["x-request-id"]


@pytest.mark.parametrize(
    ("fields", "error_text"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": make_user_message([{"type": "tool_result"}])},
            "messages[0].content[0].tool_use_id is required",
        ),
        (
            {"messages": make_user_message([{"type": "image", "source": {"type": "file"}}])},
            "content[0].source has the type 'file'",
        ),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is required"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name is 'f'"),
        ({"stop_sequences": ["x" * 3000]}, "stop_sequences"),
        ({"container": "c"}, "container is not supported"),
        ({"colour": 1}, "unknown field 'colour'"),
    ],
)
def test_invalid_values_are_refused_with_the_name_of_the_field(
    url: str, fields: dict[str, Any], error_text: str
) -> None:
    body = {"model": "demo", "max_tokens": 5, "messages": make_user_message("x"), **fields}
    refused_response = httpx.post(f"{url}v1/messages", json=body)
    assert refused_response.status_code == 400
    assert error_text in refused_response.json()["error"]["message"]


def test_requests_of_claude_code_are_accepted(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """A hosted tool is dropped with a warning. A request that chooses the hosted tool is refused."""
    cache_fields = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {
        "model": "demo",
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": "You are Claude Code", **cache_fields},
            {"type": "text", "text": "More"},
        ],
        "messages": [
            *make_user_message(
                [
                    {"type": "text", "text": "<system-reminder>", **cache_fields},
                    {"type": "text", "text": "Hi"},
                ]
            )
        ],
        "tools": [
            {**WEATHER, "name": "Bash", **cache_fields},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "metadata": {"user_id": "user_" + "0" * 120},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "temperature": 1,
        "stream": True,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "k"}
    with caplog.at_level(logging.WARNING):
        answer = httpx.post(f"{url}v1/messages?beta=true", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    deltas = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    text = "".join(
        [delta["delta"].get("text", "") for delta in deltas if delta["type"] == "content_block_delta"]
    )
    assert text.endswith("system: You are Claude Code\nMoreuser: <system-reminder>\nHi")
    assert '"name": "Bash"' in text
    assert '"web_search"' not in text
    assert "web_search_20250305" in caplog.text
    refused_response = httpx.post(
        f"{url}v1/messages", json={**body, "tool_choice": {"type": "tool", "name": "web_search"}}
    )
    assert "the hosted tool 'web_search_20250305'" in refused_response.json()["error"]["message"]


def test_a_deferred_tool_is_in_the_prompt_after_a_tool_search(url: str) -> None:
    """A deferred tool and a result of a tool search that refers to this tool are in the prompt."""
    tool_use = {"type": "tool_use", "id": "t1", "name": "search", "input": {}}
    references = [{"type": "tool_reference", "tool_name": "deferred_tool"}]
    body = {
        "model": "demo",
        "max_tokens": 500,
        "messages": [
            *make_user_message("x"),
            {"role": "assistant", "content": [tool_use]},
            *make_user_message([{"type": "tool_result", "tool_use_id": "t1", "content": references}]),
        ],
        "tools": [{**WEATHER, "name": "deferred_tool", "defer_loading": True}],
    }
    answer = httpx.post(f"{url}v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    text = answer.json()["content"][0]["text"]
    assert '"name": "deferred_tool"' in text
    assert "tool: The tool deferred_tool is available." in text
    references[0].pop("tool_name")
    refused_response = httpx.post(f"{url}v1/messages", json=body)
    assert (
        "messages[2].content[0].content[0].tool_name is required"
        in refused_response.json()["error"]["message"]
    )


async def test_the_api_key_is_accepted_in_x_api_key_and_in_authorization() -> None:
    async with run_in_process(FakePipeline.saying("Hello!"), api_key=("k1",)) as server:
        body = {"model": "demo", "max_tokens": 5, "messages": make_user_message("x")}
        refused_response = await server.http.post("/v1/messages", json=body)
        assert refused_response.json()["error"]["type"] == "authentication_error"
        for headers in ({"x-api-key": "k1"}, {"authorization": "Bearer k1"}):
            assert (await server.http.post("/v1/messages", json=body, headers=headers)).status_code == 200
        wrong_response = await server.http.post("/v1/messages", json=body, headers={"x-api-key": "k2"})
        assert wrong_response.status_code == 401
