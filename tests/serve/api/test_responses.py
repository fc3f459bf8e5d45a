"""The Responses API with OpenAI's official client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from support.chatting import HERMES, THINKING, chatting, events_of

from penstock.testing import FakePipeline

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CALL = 'I look. <tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Change files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}


def echoing() -> FakePipeline:
    """A model that repeats the whole prompt, with line ends as bars."""
    return FakePipeline.answering(lambda prompt: prompt.removesuffix("assistant: ").replace("\n", "|"))


async def test_create_and_retrieve() -> None:
    async with chatting() as server:
        client = server.openai
        made = await client.responses.create(
            model="demo", input="Hi", instructions="Be brief", metadata={"a": "b"}, temperature=0.5, user="u"
        )
        assert (made.output_text, made.status, made.model) == ("Hello!", "completed", "demo")
        assert made.usage is not None
        assert made.usage.output_tokens == 7
        assert made.usage.total_tokens == made.usage.input_tokens + 7
        assert (made.metadata, made.temperature, made.user) == ({"a": "b"}, 0.5, "u")
        assert (made.instructions, made.parallel_tool_calls, made.store) == ("Be brief", True, None) or (
            made.to_dict()["store"] is True
        )
        again = await client.responses.retrieve(made.id)
        assert again.to_dict() == made.to_dict()
        items = await client.responses.input_items.list(made.id)
        assert [item.to_dict()["content"] for item in items.data] == [[{"type": "input_text", "text": "Hi"}]]
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
        unstored = await client.responses.create(model="demo", input="Hi", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unstored.id)
        assert (await client.responses.input_tokens.count(model="demo", input="Hi")).input_tokens > 2


async def test_the_whole_conversation_reaches_the_template() -> None:
    async with chatting(echoing()) as server:
        items: Any = [
            {"role": "developer", "content": "D"},
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Let me see"}],
            },
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city":"Rome"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        ]
        made = await server.openai.responses.create(model="demo", instructions="I", input=items)
        assert made.output_text == (
            'system: I||Duser: Weather?assistant: Let me see<tool_call>{"name": "get_weather", '
            '"arguments": {"city": "Rome"}}</tool_call>tool: sunny'
        )


async def test_previous_response() -> None:
    async with chatting(echoing()) as server:
        client = server.openai
        first = await client.responses.create(model="demo", instructions="I", input="A")
        assert first.output_text == "system: Iuser: A"
        second = await client.responses.create(model="demo", input="B", previous_response_id=first.id)
        assert second.output_text == "user: Aassistant: system: Iuser: Auser: B"
        listed = await client.responses.input_items.list(second.id, order="asc", limit=2)
        assert [item.to_dict()["role"] for item in listed.data] == ["user", "assistant"]
        assert listed.has_more
        rest = await client.responses.input_items.list(second.id, order="asc", after=listed.last_id)
        assert [item.to_dict()["content"][0]["text"] for item in rest.data] == ["B"]  # type: ignore[index]
        reference: Any = [
            {"type": "item_reference", "id": first.output[0].id},
            {"role": "user", "content": "C"},
        ]
        third = await client.responses.create(model="demo", input=reference)
        assert third.output_text == "assistant: system: Iuser: Auser: C"
        with pytest.raises(openai.BadRequestError, match="no stored response") as unknown:
            await client.responses.create(model="demo", input="B", previous_response_id="resp_0")
        assert unknown.value.code == "previous_response_not_found"


async def test_stream_events_in_order() -> None:
    async with chatting() as server:
        names = []
        async with server.openai.responses.stream(model="demo", input="Hi") as stream:
            async for event in stream:
                names.append(event.type)
            final = await stream.get_final_response()
        deltas = names.count("response.output_text.delta")
        assert deltas >= 1
        assert names == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            *["response.output_text.delta"] * deltas,
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert final.output_text == "Hello!"
        assert (await server.openai.responses.retrieve(final.id)).output_text == "Hello!"
        raw = await server.post("/v1/responses", input="Hi", stream=True)
        numbers = [event["sequence_number"] for event in events_of(raw.text)]
        assert numbers == list(range(len(numbers)))
        assert raw.text.startswith("event: response.created\ndata: ")


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_and_reasoning(stream: bool) -> None:
    text = "<think>Hm.</think>" + CALL
    async with chatting(FakePipeline.saying(text), template=THINKING) as server:
        given: Any = {
            "model": "demo",
            "input": "Weather?",
            "tools": [WEATHER],
            "include": ["reasoning.encrypted_content"],
        }
        if stream:
            async with server.openai.responses.stream(**given) as events:
                made = await events.get_final_response()
        else:
            made = await server.openai.responses.create(**given)
        thought, message, call = [item.to_dict() for item in made.output]
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        assert message["content"][0]["text"] == "I look."  # type: ignore[index]
        assert (call["type"], call["name"], json.loads(str(call["arguments"]))) == (
            "function_call",
            "get_weather",
            {"city": "Paris"},
        )
        assert made.usage is not None
        assert made.usage.output_tokens_details.reasoning_tokens > 3
        # Agents return the items of the output; the encoded reasoning stands for its text.
        del thought["content"]
        follow_up = [thought, message, call, {**_output_of(call)}]
        async with chatting(echoing(), template=THINKING + "{{ messages[0].reasoning_content }}") as other:
            again = await other.openai.responses.create(model="demo", input=follow_up)  # type: ignore[arg-type]
            assert again.output_text.endswith("tool: 20assistant: Hm.")


def _output_of(call: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": "20"}


async def test_custom_tools() -> None:
    text = '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** \\"x\\""}}</tool_call>'
    async with chatting(FakePipeline.saying(text)) as server:
        names = []
        async with server.openai.responses.stream(model="demo", input="Patch", tools=[PATCH]) as stream:
            async for event in stream:
                names.append(event.type)
            made = await stream.get_final_response()
        assert names[-4:-1] == [
            "response.custom_tool_call_input.delta",
            "response.custom_tool_call_input.done",
            "response.output_item.done",
        ]
        call = made.output[0]
        assert call.type == "custom_tool_call"
        assert (call.name, call.input) == ("apply_patch", '*** "x"')
        assert [tool.type for tool in made.tools] == ["custom"]


async def test_incomplete_and_logprobs() -> None:
    async with chatting() as server:
        made = await server.openai.responses.create(model="demo", input="Hi", max_output_tokens=3)
        assert (made.status, made.output_text) == ("incomplete", "Hel")
        assert made.incomplete_details is not None
        assert made.incomplete_details.reason == "max_output_tokens"
        scored = await server.openai.responses.create(
            model="demo", input="Hi", top_logprobs=1, include=["message.output_text.logprobs"]
        )
        part = scored.output[0].content[0]  # type: ignore[union-attr,index]
        assert [one.token for one in part.logprobs] == list("Hello!")  # type: ignore[union-attr]
        async with server.openai.responses.stream(
            model="demo", input="Hi", include=["message.output_text.logprobs"]
        ) as stream:
            final = await stream.get_final_response()
        part = final.output[0].content[0]  # type: ignore[union-attr,index]
        assert [one.token for one in part.logprobs] == list("Hello!")  # type: ignore[union-attr]


async def test_background() -> None:
    async with chatting() as server:
        client = server.openai
        made = await client.responses.create(model="demo", input="Hi", background=True)
        assert made.status in ("queued", "in_progress")
        made = await _ended(client, made.id)
        assert (made.status, made.output_text, made.background) == ("completed", "Hello!", True)
        assert (await client.responses.cancel(made.id)).status == "completed"
        stream = await client.responses.create(model="demo", input="Hi", background=True, stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.completed"
        name = events[-1].response.id
        resumed = await client.responses.retrieve(name, stream=True, starting_after=2)
        assert [event.sequence_number async for event in resumed] == [
            event.sequence_number for event in events[3:]
        ]
        with pytest.raises(openai.BadRequestError, match="background needs store"):
            await client.responses.create(model="demo", input="Hi", background=True, store=False)
        plain = await client.responses.create(model="demo", input="Hi")
        with pytest.raises(openai.BadRequestError, match="only a response with background"):
            await client.responses.cancel(plain.id)


async def _ended(client: openai.AsyncOpenAI, name: str) -> Any:
    async with asyncio.timeout(30):
        while (found := await client.responses.retrieve(name)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    return found


async def test_cancel_a_background_response() -> None:
    slow = FakePipeline.saying("x" * 100_000)
    async with chatting(slow) as server:
        made = await server.openai.responses.create(model="demo", input="Hi", background=True)
        cancelled = await server.openai.responses.cancel(made.id)
        assert cancelled.status == "cancelled"
        assert (await server.openai.responses.retrieve(made.id)).status == "cancelled"
        assert server.services.gate.num_active == 0


async def test_codex_request(caplog: pytest.LogCaptureFixture) -> None:
    """The fields that Codex CLI sends; hosted tools are skipped and reported once."""
    body = {
        "model": "demo",
        "instructions": "You are a coding agent",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<rules>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<env>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it"}]},
        ],
        "tools": [
            {**WEATHER, "name": "exec_command"},
            PATCH,
            {"type": "web_search", "external_web_access": False},
            {"type": "image_generation", "output_format": "png"},
            {"type": "namespace", "name": "mcp", "description": "", "tools": []},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "medium"},
        "service_tier": None,
        "client_metadata": None,
    }
    async with chatting(echoing()) as server:
        first = await server.http.post("/v1/responses", json=body)
        assert first.status_code == 200, first.text
        final = events_of(first.text)[-1]
        assert final["type"] == "response.completed"
        text = final["response"]["output"][0]["content"][0]["text"]
        assert "exec_command" in text
        assert "web_search" not in text
        skipped = [one for one in caplog.messages if "hosted tool" in one]
        assert len(skipped) == 3
        caplog.clear()
        assert (await server.http.post("/v1/responses", json=body)).status_code == 200
        assert not [one for one in caplog.messages if "hosted tool" in one]
        refused = await server.refusal("/v1/responses", **{**body, "tool_choice": {"type": "web_search"}})
        assert refused["param"] == "tool_choice.type"
    async with chatting(hosted_tools="refuse") as server:
        refused = await server.refusal("/v1/responses", **body)
        assert refused["param"] == "tools[2].type"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "message", "role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": "Hi", "tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"input": "Hi", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"input": "Hi", "conversation": "c"}, "conversation"),
        (
            {
                "instructions": "I",
                "input": [{"role": "developer", "content": "D"}, {"role": "", "content": "x"}],
            },
            "input[1]",
        ),
        ({"input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "Hi", "max_output_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"input": "Hi", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": "Hi", "colour": 1}, "colour"),
        ({"input": "Hi", "truncation": "none"}, "truncation"),
        ({"input": "x" * 3000}, "input"),
    ],
)
async def test_refusals_name_the_field(body: dict[str, Any], param: str) -> None:
    async with chatting() as server:
        server.services.tokenizer.max_length = 2048
        refused = await server.refusal("/v1/responses", **body)
        assert refused["param"] == param
        if "min_tokens" in body:
            assert "but max_output_tokens 2" in refused["message"]


async def test_truncation_drops_the_oldest_turns() -> None:
    async with chatting(FakePipeline.answering(lambda prompt: prompt[:60].replace("\n", "|"))) as server:
        server.services.tokenizer.max_length = 2048
        turns: list[Any] = []
        for index in range(20):
            turns += [
                {"role": "user", "content": f"Q{index} " + "x" * 200},
                {"role": "assistant", "content": "A"},
            ]
        given: Any = [*turns, {"role": "user", "content": "last"}]
        made = await server.openai.responses.create(
            model="demo", instructions="I", input=given, truncation="auto", max_output_tokens=1000
        )
        assert made.output_text.startswith("system: Iuser: Q16 ")
        assert made.usage is not None
        assert made.usage.input_tokens <= 1048
        with pytest.raises(openai.BadRequestError) as whole:
            await server.openai.responses.create(model="demo", input=given)
        assert whole.value.code == "context_length_exceeded"


async def test_state_survives_a_restart(tmp_path: Path) -> None:
    async with chatting(state_dir=str(tmp_path)) as server:
        made = await server.openai.responses.create(model="demo", input="Hi")
    async with chatting(echoing(), state_dir=str(tmp_path)) as server:
        assert (await server.openai.responses.retrieve(made.id)).output_text == "Hello!"
        after = await server.openai.responses.create(model="demo", input="B", previous_response_id=made.id)
        assert after.output_text == "user: Hiassistant: Hello!user: B"


async def test_the_store_is_bounded() -> None:
    async with chatting(response_store_size=4000) as server:
        made = [await server.openai.responses.create(model="demo", input="Hi") for _ in range(4)]
        with pytest.raises(openai.NotFoundError):
            await server.openai.responses.retrieve(made[0].id)
        assert (await server.openai.responses.retrieve(made[3].id)).id == made[3].id


async def test_clients_see_only_their_own_responses() -> None:
    async with chatting(api_key=("one", "two")) as server:
        one, two = server.openai.with_options(api_key="one"), server.openai.with_options(api_key="two")
        made = await one.responses.create(model="demo", input="Hi", background=True)
        for wait in (False, True):
            if wait:
                await _ended(one, made.id)
            with pytest.raises(openai.NotFoundError):
                await two.responses.retrieve(made.id)


class Answer(BaseModel):
    """The output of `parse`."""

    city: str


async def test_parse() -> None:
    async with chatting(
        FakePipeline.saying('{"city": "Bonn"}'), template=HERMES, grammars_enabled=True
    ) as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "penstock.serve.api.conversation._grammar", lambda *_: None
            )  # the fake engine has no grammars
            parsed = await server.openai.responses.parse(model="demo", input="Where?", text_format=Answer)
        assert parsed.output_parsed == Answer(city="Bonn")
