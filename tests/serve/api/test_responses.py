"""The Responses API with OpenAI's official client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from support.in_process_server import HERMES, THINKING, parse_events, run_in_process

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


def make_echo_pipeline() -> FakePipeline:
    """Return a pipeline that repeats the prompt without a final ``assistant: ``, with ``|`` for line ends."""
    return FakePipeline.answering(lambda prompt: prompt.removesuffix("assistant: ").replace("\n", "|"))


async def test_a_response_is_created_retrieved_and_deleted() -> None:
    async with run_in_process() as server:
        client = server.openai
        response = await client.responses.create(
            model="demo", input="Hi", instructions="Be brief", metadata={"a": "b"}, temperature=0.5, user="u"
        )
        assert (response.output_text, response.status, response.model) == ("Hello!", "completed", "demo")
        assert response.usage is not None
        assert response.usage.output_tokens == 7
        assert response.usage.total_tokens == response.usage.input_tokens + 7
        assert (response.metadata, response.temperature, response.user) == ({"a": "b"}, 0.5, "u")
        assert (response.instructions, response.parallel_tool_calls, response.store) == (
            "Be brief",
            True,
            True,
        )
        retrieved = await client.responses.retrieve(response.id)
        assert retrieved.to_dict() == response.to_dict()
        items = await client.responses.input_items.list(response.id)
        assert [item.to_dict()["content"] for item in items.data] == [[{"type": "input_text", "text": "Hi"}]]
        await client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
        unstored_response = await client.responses.create(model="demo", input="Hi", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unstored_response.id)
        assert (await client.responses.input_tokens.count(model="demo", input="Hi")).input_tokens > 2


async def test_the_whole_conversation_is_rendered_by_the_template() -> None:
    async with run_in_process(make_echo_pipeline()) as server:
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
        response = await server.openai.responses.create(model="demo", instructions="I", input=items)
        assert response.output_text == (
            'system: I||Duser: Weather?assistant: Let me see<tool_call>{"name": "get_weather", '
            '"arguments": {"city": "Rome"}}</tool_call>tool: sunny'
        )


async def test_a_previous_response_is_part_of_the_conversation() -> None:
    async with run_in_process(make_echo_pipeline()) as server:
        client = server.openai
        first_response = await client.responses.create(model="demo", instructions="I", input="A")
        assert first_response.output_text == "system: Iuser: A"
        second_response = await client.responses.create(
            model="demo", input="B", previous_response_id=first_response.id
        )
        assert second_response.output_text == "user: Aassistant: system: Iuser: Auser: B"
        input_items = await client.responses.input_items.list(second_response.id, order="asc", limit=2)
        assert [item.to_dict()["role"] for item in input_items.data] == ["user", "assistant"]
        assert input_items.has_more
        later_items = await client.responses.input_items.list(
            second_response.id, order="asc", after=input_items.last_id
        )
        assert [item.to_dict()["content"][0]["text"] for item in later_items.data] == ["B"]  # type: ignore[index]
        items: Any = [
            {"type": "item_reference", "id": first_response.output[0].id},
            {"role": "user", "content": "C"},
        ]
        third_response = await client.responses.create(model="demo", input=items)
        assert third_response.output_text == "assistant: system: Iuser: Auser: C"
        with pytest.raises(openai.BadRequestError, match="no stored response") as unknown_error:
            await client.responses.create(model="demo", input="B", previous_response_id="resp_0")
        assert unknown_error.value.code == "previous_response_not_found"


async def test_stream_events_have_the_documented_order() -> None:
    async with run_in_process() as server:
        names = []
        async with server.openai.responses.stream(model="demo", input="Hi") as stream:
            async for event in stream:
                names.append(event.type)
            final_response = await stream.get_final_response()
        num_deltas = names.count("response.output_text.delta")
        assert num_deltas >= 1
        assert names == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            *["response.output_text.delta"] * num_deltas,
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert final_response.output_text == "Hello!"
        assert (await server.openai.responses.retrieve(final_response.id)).output_text == "Hello!"
        raw_response = await server.post("/v1/responses", input="Hi", stream=True)
        sequence_numbers = [event["sequence_number"] for event in parse_events(raw_response.text)]
        assert sequence_numbers == list(range(len(sequence_numbers)))
        assert raw_response.text.startswith("event: response.created\ndata: ")


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_and_reasoning_are_output_items(stream: bool) -> None:
    text = "<think>Hm.</think>" + CALL
    async with run_in_process(FakePipeline.saying(text), template=THINKING) as server:
        fields: Any = {
            "model": "demo",
            "input": "Weather?",
            "tools": [WEATHER],
            "include": ["reasoning.encrypted_content"],
        }
        if stream:
            async with server.openai.responses.stream(**fields) as events:
                response = await events.get_final_response()
        else:
            response = await server.openai.responses.create(**fields)
        reasoning_item, message, call = [item.to_dict() for item in response.output]
        assert reasoning_item["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        assert message["content"][0]["text"] == "I look."  # type: ignore[index]
        assert (call["type"], call["name"], json.loads(str(call["arguments"]))) == (
            "function_call",
            "get_weather",
            {"city": "Paris"},
        )
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens > 3
        # Agents send the output items back. The field encrypted_content has the reasoning text.
        del reasoning_item["content"]
        items = [reasoning_item, message, call, {**_make_call_output(call)}]
        async with run_in_process(
            make_echo_pipeline(), template=THINKING + "{{ messages[0].reasoning_content }}"
        ) as echo_server:
            second_response = await echo_server.openai.responses.create(model="demo", input=items)  # type: ignore[arg-type]
            assert second_response.output_text.endswith("tool: 20assistant: Hm.")


def _make_call_output(call: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": "20"}


async def test_custom_tools_are_called_with_text() -> None:
    text = '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** \\"x\\""}}</tool_call>'
    async with run_in_process(FakePipeline.saying(text)) as server:
        names = []
        async with server.openai.responses.stream(model="demo", input="Patch", tools=[PATCH]) as stream:
            async for event in stream:
                names.append(event.type)
            response = await stream.get_final_response()
        assert names[-4:-1] == [
            "response.custom_tool_call_input.delta",
            "response.custom_tool_call_input.done",
            "response.output_item.done",
        ]
        call = response.output[0]
        assert call.type == "custom_tool_call"
        assert (call.name, call.input) == ("apply_patch", '*** "x"')
        assert [tool.type for tool in response.tools] == ["custom"]


async def test_responses_report_incomplete_outputs_and_log_probabilities() -> None:
    async with run_in_process() as server:
        response = await server.openai.responses.create(model="demo", input="Hi", max_output_tokens=3)
        assert (response.status, response.output_text) == ("incomplete", "Hel")
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        scored_response = await server.openai.responses.create(
            model="demo", input="Hi", top_logprobs=1, include=["message.output_text.logprobs"]
        )
        text_part = scored_response.output[0].content[0]  # type: ignore[union-attr,index]
        assert [score.token for score in text_part.logprobs] == list("Hello!")  # type: ignore[union-attr]
        async with server.openai.responses.stream(
            model="demo", input="Hi", include=["message.output_text.logprobs"]
        ) as stream:
            final_response = await stream.get_final_response()
        text_part = final_response.output[0].content[0]  # type: ignore[union-attr,index]
        assert [score.token for score in text_part.logprobs] == list("Hello!")  # type: ignore[union-attr]


async def test_a_background_response_can_be_polled_and_streamed() -> None:
    async with run_in_process() as server:
        client = server.openai
        response = await client.responses.create(model="demo", input="Hi", background=True)
        assert response.status in ("queued", "in_progress")
        response = await _wait_until_ended(client, response.id)
        assert (response.status, response.output_text, response.background) == ("completed", "Hello!", True)
        assert (await client.responses.cancel(response.id)).status == "completed"
        stream = await client.responses.create(model="demo", input="Hi", background=True, stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.completed"
        response_id = events[-1].response.id
        resumed_stream = await client.responses.retrieve(response_id, stream=True, starting_after=2)
        assert [event.sequence_number async for event in resumed_stream] == [
            event.sequence_number for event in events[3:]
        ]
        with pytest.raises(openai.BadRequestError, match="background requires store"):
            await client.responses.create(model="demo", input="Hi", background=True, store=False)
        plain_response = await client.responses.create(model="demo", input="Hi")
        with pytest.raises(openai.BadRequestError, match="only a background response"):
            await client.responses.cancel(plain_response.id)


async def _wait_until_ended(client: openai.AsyncOpenAI, response_id: str) -> Any:
    async with asyncio.timeout(30):
        while (response := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    return response


async def test_a_background_response_can_be_cancelled() -> None:
    long_pipeline = FakePipeline.saying("x" * 100_000)
    async with run_in_process(long_pipeline) as server:
        response = await server.openai.responses.create(model="demo", input="Hi", background=True)
        cancelled_response = await server.openai.responses.cancel(response.id)
        assert cancelled_response.status == "cancelled"
        assert (await server.openai.responses.retrieve(response.id)).status == "cancelled"
        assert server.services.gate.num_active == 0


async def test_requests_of_codex_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    """The fields that Codex CLI sends are accepted. A warning is logged once for each hosted tool."""
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
    async with run_in_process(make_echo_pipeline()) as server:
        response = await server.http.post("/v1/responses", json=body)
        assert response.status_code == 200, response.text
        final_event = parse_events(response.text)[-1]
        assert final_event["type"] == "response.completed"
        text = final_event["response"]["output"][0]["content"][0]["text"]
        assert "exec_command" in text
        assert "web_search" not in text
        warnings = [message for message in caplog.messages if "hosted tool" in message]
        assert len(warnings) == 3
        caplog.clear()
        assert (await server.http.post("/v1/responses", json=body)).status_code == 200
        assert not [message for message in caplog.messages if "hosted tool" in message]
        refusal_error = await server.expect_refusal(
            "/v1/responses", **{**body, "tool_choice": {"type": "web_search"}}
        )
        assert refusal_error["param"] == "tool_choice.type"
    async with run_in_process(hosted_tools="refuse") as server:
        refusal_error = await server.expect_refusal("/v1/responses", **body)
        assert refusal_error["param"] == "tools[2].type"


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
async def test_invalid_values_are_refused_with_the_name_of_the_field(
    body: dict[str, Any], param: str
) -> None:
    async with run_in_process() as server:
        server.services.tokenizer.max_length = 2048
        refusal_error = await server.expect_refusal("/v1/responses", **body)
        assert refusal_error["param"] == param
        if "min_tokens" in body:
            assert "but max_output_tokens is 2" in refusal_error["message"]


async def test_truncation_drops_the_oldest_turns() -> None:
    async with run_in_process(
        FakePipeline.answering(lambda prompt: prompt[:60].replace("\n", "|"))
    ) as server:
        server.services.tokenizer.max_length = 2048
        turns: list[Any] = []
        for index in range(20):
            turns += [
                {"role": "user", "content": f"Q{index} " + "x" * 200},
                {"role": "assistant", "content": "A"},
            ]
        conversation: Any = [*turns, {"role": "user", "content": "last"}]
        response = await server.openai.responses.create(
            model="demo", instructions="I", input=conversation, truncation="auto", max_output_tokens=1000
        )
        assert response.output_text.startswith("system: Iuser: Q16 ")
        assert response.usage is not None
        assert response.usage.input_tokens <= 1048
        with pytest.raises(openai.BadRequestError) as error:
            await server.openai.responses.create(model="demo", input=conversation)
        assert error.value.code == "context_length_exceeded"


async def test_stored_responses_survive_a_restart(tmp_path: Path) -> None:
    async with run_in_process(state_dir=str(tmp_path)) as server:
        response = await server.openai.responses.create(model="demo", input="Hi")
    async with run_in_process(make_echo_pipeline(), state_dir=str(tmp_path)) as server:
        assert (await server.openai.responses.retrieve(response.id)).output_text == "Hello!"
        later_response = await server.openai.responses.create(
            model="demo", input="B", previous_response_id=response.id
        )
        assert later_response.output_text == "user: Hiassistant: Hello!user: B"


async def test_the_size_of_stored_responses_is_bounded() -> None:
    async with run_in_process(response_store_size=4000) as server:
        responses = [await server.openai.responses.create(model="demo", input="Hi") for _ in range(4)]
        with pytest.raises(openai.NotFoundError):
            await server.openai.responses.retrieve(responses[0].id)
        assert (await server.openai.responses.retrieve(responses[3].id)).id == responses[3].id


async def test_clients_see_only_their_own_responses() -> None:
    async with run_in_process(api_key=("one", "two")) as server:
        first_client = server.openai.with_options(api_key="one")
        second_client = server.openai.with_options(api_key="two")
        response = await first_client.responses.create(model="demo", input="Hi", background=True)
        for has_ended in (False, True):
            if has_ended:
                await _wait_until_ended(first_client, response.id)
            with pytest.raises(openai.NotFoundError):
                await second_client.responses.retrieve(response.id)


class Answer(BaseModel):
    """The output schema of `test_parse_returns_structured_output`."""

    city: str


async def test_parse_returns_structured_output() -> None:
    async with run_in_process(
        FakePipeline.saying('{"city": "Bonn"}'), template=HERMES, grammars_enabled=True
    ) as server:
        with pytest.MonkeyPatch.context() as patch:
            # The fake model supports no grammars.
            patch.setattr("penstock.serve.api.conversation._grammar", lambda *_: None)
            answer = await server.openai.responses.parse(model="demo", input="Where?", text_format=Answer)
        assert answer.output_parsed == Answer(city="Bonn")
