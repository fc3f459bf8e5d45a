"""Requests to a server of the demo model, most of them by the official OpenAI client through a socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel
from support.asgi import wait_until
from support.in_process_server import InProcessServer, run_in_process

from penstock.assembly import load_runtime, load_tokenizer
from penstock.config import PipelineConfig
from penstock.serve.http.server import HttpServer

CONFIG = PipelineConfig.from_flat({"model_path": "demo", "kv_cache_memory": 64 * 2**20})
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@asynccontextmanager
async def serve_demo() -> AsyncIterator[tuple[AsyncOpenAI, InProcessServer]]:
    """Serve the demo model over HTTP."""
    tokenizer = load_tokenizer(CONFIG)
    async with run_in_process(
        make_runtime=partial(load_runtime, CONFIG), tokenizer=tokenizer, pipeline_config=CONFIG
    ) as server:
        tokenizer.max_length = server.services.worker.info.max_length
        app = server.app
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(128)
            async with HttpServer(app, server.services.config).listening(listener):
                url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
                async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                    yield client, server


async def test_the_openai_client_works_with_the_demo_model() -> None:
    async with serve_demo() as (client, server):
        await check_answers(client)
        await check_tools(client)
        await check_completions(client)
        await check_responses(client)
        await check_ollama(server)
        await check_extra_fields_of_other_servers(client)
        await check_errors(client)
        await check_disconnect(client, server)
        await check_concurrent_requests(client, server)


async def check_answers(client: AsyncOpenAI) -> None:
    question: Any = [{"role": "user", "content": "What is the capital of Germany?"}]
    answer = await client.chat.completions.create(
        model="demo", messages=question, temperature=0, logprobs=True
    )
    assert answer.choices[0].message.content == "The capital of Germany is Berlin."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    assert "".join(score.token for score in scores.content) == answer.choices[0].message.content
    assert all(score.logprob <= 0 for score in scores.content)
    assert answer.usage.completion_tokens == len(scores.content) + 1

    stream = await client.chat.completions.create(
        model="demo",
        messages=question,
        temperature=0,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, usage = {0: "", 1: ""}, None
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        usage = chunk.usage or usage
    assert set(texts.values()) == {answer.choices[0].message.content}
    assert usage is not None
    assert usage.prompt_tokens == answer.usage.prompt_tokens
    assert usage.completion_tokens == 2 * answer.usage.completion_tokens

    story: Any = [{"role": "user", "content": "tell me a story about a dragon"}]
    sampled_texts = [
        (
            await client.chat.completions.create(
                model="demo", messages=story, temperature=1.0, seed=seed, max_tokens=40
            )
        )
        .choices[0]
        .message.content
        for seed in (0, 0, 1)
    ]
    assert sampled_texts[0] == sampled_texts[1] != sampled_texts[2]
    text_parts = []
    async with client.chat.completions.stream(
        model="demo", messages=story, temperature=1.0, seed=0, max_tokens=40
    ) as events:
        async for event in events:
            if event.type == "content.delta":
                text_parts.append(event.delta)
    assert "".join(text_parts) == sampled_texts[0]


async def check_tools(client: AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What's the weather like in Paris today?"}]
    call_response = await client.chat.completions.create(
        model="demo", messages=messages, tools=[WEATHER], temperature=0
    )
    assert call_response.choices[0].finish_reason == "tool_calls"
    [call] = call_response.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    messages += [
        call_response.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 18, "weather": "sunny"}'},
    ]
    final_response = await client.chat.completions.create(
        model="demo", messages=messages, tools=[WEATHER], temperature=0
    )
    assert "18" in (final_response.choices[0].message.content or "")


async def check_completions(client: AsyncOpenAI) -> None:
    completion = await client.completions.create(
        model="demo",
        prompt=["Once upon a time", "One day"],
        max_tokens=12,
        temperature=0,
        logprobs=2,
        echo=True,
    )
    assert [choice.text[:7] for choice in completion.choices] == ["Once up", "One day"]
    for choice in completion.choices:
        rows = choice.logprobs
        assert rows is not None
        assert rows.tokens is not None
        assert "".join(rows.tokens) == choice.text
        assert rows.text_offset is not None
        assert all(
            choice.text[start:].startswith(token)
            for start, token in zip(rows.text_offset, rows.tokens, strict=True)
        )
        assert rows.token_logprobs is not None
        assert rows.token_logprobs[0] is None
        assert all(value <= 0 for value in rows.token_logprobs[1:])
    stream = await client.completions.create(
        model="demo", prompt="Once upon a time", max_tokens=12, temperature=0, stream=True
    )
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert "Once upon a time" + text == completion.choices[0].text


class City(BaseModel):
    """The output schema of `check_responses`."""

    name: str


async def check_responses(client: AsyncOpenAI) -> None:
    question = "What is the capital of Germany?"
    answer = await client.responses.create(model="demo", input=question, temperature=0)
    assert answer.output_text == "The capital of Germany is Berlin."
    async with client.responses.stream(model="demo", input=question, temperature=0) as stream:
        assert (await stream.get_final_response()).output_text == answer.output_text
    parsed_response = await client.responses.parse(
        model="demo", input=question, text_format=City, temperature=0, max_output_tokens=64
    )
    assert isinstance(parsed_response.output_parsed, City)
    call_response = await client.responses.create(
        model="demo",
        input="What's the weather like in Paris today?",
        tools=[{"type": "function", **WEATHER["function"], "strict": True}],
        temperature=0,
    )
    [call] = call_response.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    forced_call = await client.responses.create(
        model="demo",
        input="Hi",
        tools=[{"type": "custom", "name": "patch"}],
        tool_choice={"type": "custom", "name": "patch"},
        max_output_tokens=60,
    )
    assert forced_call.output[0].type == "custom_tool_call"


async def check_ollama(server: InProcessServer) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]}
    fields: Any = {"messages": [{"role": "user", "content": "Hi"}], "format": schema, "stream": False}
    answer = await server.post("/api/chat", **fields, options={"num_predict": 60})
    assert json.loads(answer.json()["message"]["content"]) == {"n": 1}


async def check_extra_fields_of_other_servers(client: AsyncOpenAI) -> None:
    question: Any = [{"role": "user", "content": "What is the capital of Germany?"}]

    async def complete_chat(stream: bool, **extra_fields: Any) -> str:
        fields: Any = {"model": "demo", "messages": question, "temperature": 0, "max_tokens": 30}
        answer = await client.chat.completions.create(**fields, stream=stream, extra_body=extra_fields)
        if not stream:
            return answer.choices[0].message.content or ""
        return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

    default_answer = "The capital of Germany is Berlin."
    for stream in (False, True):
        assert (
            await complete_chat(stream, cache_prompt=True, store=False, verbosity="low", top_k=1)
            == default_answer
        )
        assert (
            await complete_chat(stream, chat_template_kwargs={"unread": 1}, include_reasoning=False)
            == default_answer
        )
        assert await complete_chat(stream, guided_regex="[A-C]{2}") in {a + b for a in "ABC" for b in "ABC"}
        assert await complete_chat(stream, guided_choice=["Bonn", "Berlin"]) in (
            "Bonn",
            "Berlin",
        )
        assert json.loads(await complete_chat(stream, guided_json={"enum": [1, 2]})) in (1, 2)
        assert await complete_chat(stream, guided_grammar='root ::= "x" "y"') == "xy"
        assert (
            await complete_chat(stream, stop=["Germany"], include_stop_str_in_output=True)
            == default_answer[:22]
        )
        assert "Berlin" not in await complete_chat(stream, bad_words=["Berlin"])
        assert await complete_chat(stream, repeat_penalty=1.0) == default_answer
        assert await complete_chat(stream, truncate_prompt_tokens=1000) == default_answer
    scored_response = await client.chat.completions.create(
        model="demo",
        messages=question,
        temperature=0,
        logprobs=True,
        top_logprobs=1,
        extra_body={"prompt_logprobs": 2, "return_tokens_as_token_ids": True},
    )
    assert scored_response.usage is not None
    assert scored_response.model_extra is not None
    first_row, *rows = scored_response.model_extra["prompt_logprobs"]
    assert first_row is None
    assert len(rows) == scored_response.usage.prompt_tokens - 1
    assert all(len(row) in (2, 3) and any(value["rank"] == 1 for value in row.values()) for row in rows)
    assert scored_response.choices[0].logprobs is not None
    entries = scored_response.choices[0].logprobs.content or []
    assert all(entry.token.startswith("token_id:") for entry in entries)
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == default_answer
    plain_response = await client.completions.create(
        model="demo", prompt="Once upon", max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    assert plain_response.usage is not None
    assert len(plain_response.choices[0].model_extra["prompt_logprobs"]) == plain_response.usage.prompt_tokens  # type: ignore[index]


async def check_errors(client: AsyncOpenAI) -> None:
    message: Any = [{"role": "user", "content": "Hi"}]
    with pytest.raises(openai.NotFoundError) as unknown_error:
        await client.chat.completions.create(model="gpt-4", messages=message)
    assert (unknown_error.value.code, unknown_error.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as unsupported_error:
        await client.chat.completions.create(model="demo", messages=message, store=True, stream=True)
    assert unsupported_error.value.param == "store"
    with pytest.raises(openai.BadRequestError) as length_error:
        await client.completions.create(model="demo", prompt="dragon " * 5000)
    assert length_error.value.code == "context_length_exceeded"
    assert [model.id async for model in client.models.list()] == ["demo"]
    assert (await client.models.retrieve("demo")).id == "demo"


async def close_stream_early(stream: openai.AsyncStream[Any]) -> None:
    """Close a stream before its end, and then the generators inside the stream.

    ``stream.close`` leaves these generators suspended. The garbage collector could then close them in another
    thread while the event loop closes them too ("async generator already executing").
    """
    await stream.close()
    # The iteration raises no error if the client has already received the end of the stream.
    with suppress(openai.APIConnectionError):
        async for _ in stream:
            pass


async def check_disconnect(client: AsyncOpenAI, server: InProcessServer) -> None:
    worker = server.services.worker

    def num_generated_since(num_before: int) -> int:
        return worker.stats.num_generated_tokens - num_before

    num_before = worker.stats.num_generated_tokens
    stream = await client.completions.create(
        model="demo", prompt="Once", max_tokens=800, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    await close_stream_early(stream)
    await wait_until(lambda: worker.num_outstanding == worker.stats.num_used_blocks == 0)
    assert 0 < num_generated_since(num_before) < 800, "the stream was not cancelled"
    num_before = worker.stats.num_generated_tokens
    with pytest.raises(openai.APITimeoutError):
        await client.completions.create(
            model="demo", prompt="Once", max_tokens=1000, n=8, extra_body={"ignore_eos": True}, timeout=0.1
        )
    await wait_until(lambda: worker.num_outstanding == worker.stats.num_used_blocks == 0)
    assert num_generated_since(num_before) < 8000, "the request was not cancelled"


async def check_concurrent_requests(client: AsyncOpenAI, server: InProcessServer) -> None:
    async def complete(index: int) -> str:
        stream = await client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": f"Tell me a story, number {index}"}],
            max_tokens=40,
            seed=index,
            stream=True,
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if index % 4 == 3 and len(text) > 20:
                await close_stream_early(stream)
                break
        return text

    texts = await asyncio.gather(*(complete(index) for index in range(24)))
    assert all(texts)
    await wait_until(lambda: server.services.worker.num_outstanding == 0)
    await wait_until(lambda: server.services.worker.stats.num_running == 0)
    assert server.services.worker.stats.num_used_blocks == 0
