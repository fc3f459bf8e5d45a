"""The joined chunks of a stream equal the response without ``stream``, including tokens and usage."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.in_process_server import (
    HERMES,
    THINKING,
    InProcessServer,
    parse_events,
    run_in_process,
    user_message,
)
from support.joined_streams import drop_variable_fields, join_chat, join_completion

from penstock.pipelines.core import TextContext
from penstock.testing import FakePipeline

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("get_weather", "get_time")
]
CALLS = (
    'Let me see. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {"city": "Bern"}}\n</tool_call>'
)
FIELD_SETS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 3},
    {"n": 3, "seed": 4},
    {"seed": 0, "return_token_ids": True},
    {"stop": ["e", "bd"], "return_token_ids": True},
    {"stop": "a", "n": 2, "seed": -5},
    {"stop_token_ids": [99, 100, 101]},
    {"ignore_eos": True, "max_tokens": 40},
    {"min_tokens": 30, "max_tokens": 60},
]


def make_slow_pipeline() -> FakePipeline:
    """Return a pipeline that generates slowly, so that each token is a separate chunk."""
    fast_pipeline = FakePipeline()

    def choose(context: TextContext) -> int:
        time.sleep(0.001)
        return fast_pipeline._choose(context)

    return FakePipeline(choose)


async def chat_with_and_without_stream(
    server: InProcessServer, **body: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    body = {"messages": [user_message("Hi")], "seed": 1, **body}
    response = await server.post("/v1/chat/completions", **body)
    stream = await server.post(
        "/v1/chat/completions", **body, stream=True, stream_options={"include_usage": True}
    )
    assert (response.status_code, stream.status_code) == (200, 200), (response.text, stream.text)
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    return drop_variable_fields(response.json()), join_chat(parse_events(stream.text))


async def complete_with_and_without_stream(
    server: InProcessServer, **body: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    body = {"prompt": "Hi", "seed": 1, **body}
    response = await server.post("/v1/completions", **body)
    stream = await server.post("/v1/completions", **body, stream=True, stream_options={"include_usage": True})
    assert (response.status_code, stream.status_code) == (200, 200), (response.text, stream.text)
    return drop_variable_fields(response.json()), join_completion(parse_events(stream.text))


@pytest.mark.parametrize(
    "fields", [*FIELD_SETS, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2, "n": 2}]
)
async def test_streamed_chats_equal_responses(fields: dict[str, Any]) -> None:
    async with run_in_process(make_slow_pipeline()) as server:
        for question in ("Hi", "Ho", "äöü🎉"):
            response, joined_response = await chat_with_and_without_stream(
                server, messages=[user_message(question)], **fields
            )
            assert joined_response == response


@pytest.mark.parametrize(
    "fields",
    [
        *FIELD_SETS,
        {"prompt": ["a", "b", "c"], "n": 2},
        {"prompt": [[104, 105], [97]], "return_token_ids": True},
        {"logprobs": 0},
        {"logprobs": 2, "stop": ["e"]},
        {"echo": True},
        {"echo": True, "logprobs": 1, "prompt": ["é", "Ho"]},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"echo": True, "max_tokens": 0, "n": 2},
        {"max_tokens": 0},
    ],
)
async def test_streamed_completions_equal_responses(fields: dict[str, Any]) -> None:
    async with run_in_process(make_slow_pipeline()) as server:
        for prompt in ("Hi", "Ho", "éöü🎉"):
            response, joined_response = await complete_with_and_without_stream(
                server, **{"prompt": prompt, **fields}
            )
            assert joined_response == response


@pytest.mark.parametrize(
    "text", ["", "é🎉漢字 " * 9, "\n\n  x  \n", CALLS, f"{CALLS}\nDone.", '<tool_call>{"name']
)
@pytest.mark.parametrize(
    "fields", [{}, {"parallel_tool_calls": False}, {"logprobs": True, "return_token_ids": True}]
)
async def test_streamed_tool_calls_equal_responses(text: str, fields: dict[str, Any]) -> None:
    async with run_in_process(FakePipeline.saying(text), template=HERMES) as server:
        response, joined_response = await chat_with_and_without_stream(server, tools=TOOLS, **fields)
        assert joined_response == response


@pytest.mark.parametrize(
    "text",
    [
        "<think>\nWhy ask?\n</think>\n\nHello",
        "<think>never ends",
        "</think>Hello",
        f"<think>x</think>{CALLS}",
    ],
)
@pytest.mark.parametrize("fields", [{}, {"max_tokens": 12}, {"stop": ["el", "ever"]}, {"tools": TOOLS}])
async def test_streamed_reasoning_equals_responses(text: str, fields: dict[str, Any]) -> None:
    async with run_in_process(FakePipeline.saying(text), template=THINKING) as server:
        response, joined_response = await chat_with_and_without_stream(server, **fields)
        assert joined_response == response


async def test_continuous_usage_grows_to_the_final_usage() -> None:
    async with run_in_process(FakePipeline.saying("Hello!")) as server:
        for path, prompt_fields in (
            ("chat/completions", {"messages": [user_message("Hi")]}),
            ("completions", {"prompt": "Hi"}),
        ):
            options = {"continuous_usage_stats": True}
            response = await server.post(f"/v1/{path}", **prompt_fields, stream=True, stream_options=options)
            *chunks, usage_chunk, end_event = parse_events(response.text)
            assert end_event == "[DONE]"
            assert usage_chunk["choices"] == []
            counts = [chunk["usage"]["completion_tokens"] for chunk in [*chunks, usage_chunk]]
            assert counts == sorted(counts)
            assert counts[-2] == counts[-1] == 7


@pytest.mark.parametrize("n", [1, 3])
async def test_continuous_usage_counts_the_tokens_up_to_and_including_the_chunk(n: int) -> None:
    async with run_in_process(FakePipeline.saying("<think>x</think>Hello!"), template=THINKING) as server:
        for path, prompt_fields in (
            ("chat/completions", {"messages": [user_message("Hi")]}),
            ("completions", {"prompt": "Hi"}),
        ):
            options = {"continuous_usage_stats": True, "include_usage": False}
            fields = {"return_token_ids": True, "max_tokens": 50, "stream": True, "stream_options": options}
            response = await server.post(f"/v1/{path}", **prompt_fields, n=n, **fields)
            *chunks, _ = parse_events(response.text)
            num_tokens = num_ended = 0
            for chunk in chunks:
                [choice] = chunk["choices"]
                num_tokens += len(choice.get("token_ids", ()))
                # The usage counts the EOS token, which is not in `token_ids`.
                num_ended += choice["finish_reason"] is not None
                usage = chunk["usage"]
                assert usage["completion_tokens"] == num_tokens + num_ended
                assert usage["total_tokens"] == usage["prompt_tokens"] + num_tokens + num_ended
                assert usage["completion_tokens_details"]["reasoning_tokens"] <= num_tokens + num_ended
            assert num_tokens > 0


@pytest.mark.parametrize(
    "usage_fields", [{}, {"continuous_usage_stats": True}, {"continuous_usage_stats": False}]
)
async def test_without_include_usage_only_continuous_usage_is_sent(usage_fields: dict[str, bool]) -> None:
    async with run_in_process() as server:
        for path, prompt_fields in (
            ("chat/completions", {"messages": [user_message("Hi")]}),
            ("completions", {"prompt": "Hi"}),
        ):
            options = {"include_usage": False, **usage_fields}
            response = await server.post(f"/v1/{path}", **prompt_fields, stream=True, stream_options=options)
            *chunks, _ = parse_events(response.text)
            assert all(chunk["choices"] for chunk in chunks)
            assert all(
                ("usage" in chunk) == usage_fields.get("continuous_usage_stats", False) for chunk in chunks
            )


async def test_without_stream_options_no_chunk_has_usage() -> None:
    async with run_in_process() as server:
        response = await server.post("/v1/chat/completions", messages=[user_message("Hi")], stream=True)
        *chunks, _ = parse_events(response.text)
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
        response = await server.post("/v1/completions", prompt="Hi", stream=True)
        *chunks, _ = parse_events(response.text)
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
