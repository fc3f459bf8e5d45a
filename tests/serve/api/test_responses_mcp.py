"""Tool servers in the Responses API: OpenAI's client, a real tool server, and a scripted model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from support.in_process_server import HERMES, InProcessServer, parse_events, run_in_process
from support.tool_servers import ServedTools, broken_server, tool_server

from penstock.testing import FakePipeline

pytest.importorskip("mcp")

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}
CALC: Any = {"type": "mcp", "server_label": "calc"}


def call_text(name: str, **arguments: object) -> str:
    """Return the text of a tool call."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def make_scripted_model(*turns: str) -> FakePipeline:
    """Return a model whose answer to a prompt with n tool outputs is ``turns[n]``, or else the last turn."""
    return FakePipeline.answering(lambda prompt: turns[min(prompt.count("tool: "), len(turns) - 1)])


@pytest.fixture(scope="module")
def tools() -> Iterator[ServedTools]:
    with tool_server() as running_server:
        yield running_server


@pytest.fixture(autouse=True)
def _reset_tools(tools: ServedTools) -> None:
    tools.calls.clear()


def run_server(tools: ServedTools, *turns: str, **config: Any) -> Any:
    """Run a server with the tool server ``calc`` and a scripted model."""
    return run_in_process(make_scripted_model(*turns), mcp_server=(f"calc={tools.url}",), **config)


def item_types(response: Any) -> list[str]:
    """Return the types of the output items."""
    return [item.type for item in response.output]


async def create(server: InProcessServer, text: Any = "Add", **fields: Any) -> Any:
    """Create a response to a text or to input items."""
    return await server.openai.responses.create(model="demo", input=text, **fields)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("names_server", [False, True])
async def test_a_tool_is_called_and_its_output_is_used(
    tools: ServedTools, stream: bool, names_server: bool
) -> None:
    fields: Any = {"tools": [CALC]} if names_server else {}
    async with run_server(tools, "I add. " + call_text("add", a=2, b=3), "It is 5.") as server:
        if stream:
            async with server.openai.responses.stream(model="demo", input="Add", **fields) as events:
                response = await events.get_final_response()
        else:
            response = await create(server, **fields)
        list_item, first_message, call_item, last_message = response.output
        assert (list_item.type, list_item.server_label, list_item.error) == ("mcp_list_tools", "calc", None)
        assert [tool.name for tool in list_item.tools] == ["add", "fail", "slow", "long", "get/picture"]
        assert list_item.tools[0].input_schema["required"] == ["a", "b"]
        assert list_item.tools[0].annotations == {"readOnlyHint": True}
        assert first_message.content[0].text == "I add."
        assert (call_item.type, call_item.server_label, call_item.name) == ("mcp_call", "calc", "add")
        assert (json.loads(call_item.arguments), call_item.output) == ({"a": 2, "b": 3}, "5")
        assert (call_item.error, call_item.status, call_item.approval_request_id) == (None, "completed", None)
        assert last_message.content[0].text == "It is 5."
        assert (response.status, response.output_text) == ("completed", "I add.It is 5.")
        assert [tool.type for tool in response.tools] == ["mcp"]
        assert tools.calls == [("add", (2, 3))]
        num_call_tokens = len("I add. " + call_text("add", a=2, b=3)) + 1
        assert response.usage.output_tokens == num_call_tokens + len("It is 5.") + 1
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
        retrieved = await server.openai.responses.retrieve(response.id)
        assert [item.id for item in retrieved.output] == [item.id for item in response.output]
        assert retrieved.output[2].to_dict() == call_item.to_dict()


async def test_stream_events_have_the_documented_order(tools: ServedTools) -> None:
    async with run_server(tools, call_text("add", a=2, b=3), "5") as server:
        http_response = await server.post("/v1/responses", input="Add", stream=True, tools=[CALC])
        events = parse_events(http_response.text)
        names = [event["type"].removeprefix("response.") for event in events]
        num_deltas = names.count("mcp_call_arguments.delta")
        assert num_deltas >= 1
        assert names == [
            *["created", "in_progress"],
            *["output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed"],
            *["output_item.done", "output_item.added", "mcp_call.in_progress"],
            *["mcp_call_arguments.delta"] * num_deltas,
            *["mcp_call_arguments.done", "mcp_call.completed", "output_item.done"],
            *["output_item.added", "content_part.added", "output_text.delta", "output_text.done"],
            *["content_part.done", "output_item.done", "completed"],
        ]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        done_events = [event for event in events if event["type"] == "response.output_item.done"]
        assert [event["output_index"] for event in done_events] == [0, 1, 2]
        assert [event["item"]["id"] for event in done_events] == [
            item["id"] for item in events[-1]["response"]["output"]
        ]
        assert done_events[0]["item"]["tools"][0]["name"] == "add"
        deltas = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
        assert json.loads("".join(deltas)) == {"a": 2, "b": 3}
        assert all(event["output_index"] == 1 for event in events if ".mcp_call" in event["type"])


async def test_one_turn_can_call_several_tools(tools: ServedTools) -> None:
    calls = call_text("add", a=1, b=1) + call_text("fail")
    error_text = "Error: Error executing tool fail"
    async with run_server(tools, calls, "no", "Done.") as server:
        with record_prompts(server) as prompts:
            response = await create(server)
        assert item_types(response) == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
        _, add_item, fail_item, message = response.output
        assert (add_item.output, fail_item.output, fail_item.status) == ("2", None, "failed")
        assert fail_item.error.type == "mcp_tool_execution_error"
        assert message.content[0].text == "Done."
        assert prompts[1].endswith(f"assistant: {calls}tool: 2tool: {error_text}assistant: ")


@contextmanager
def record_prompts(server: InProcessServer) -> Iterator[list[str]]:
    """Yield a list that receives the prompts of the model."""
    prompts: list[str] = []
    submit_to_worker = server.services.worker.submit

    def submit(context: Any) -> Any:
        prompts.append(str(context.prompt))
        return submit_to_worker(context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.services.worker, "submit", submit)
        yield prompts


async def test_a_later_response_continues_the_conversation(tools: ServedTools) -> None:
    async with run_server(tools, call_text("add", a=2, b=3), "5") as server:
        first_response = await create(server)
        num_list_requests_before = tools.num_list_requests
        with record_prompts(server) as prompts:
            second_response = await create(server, "And?", previous_response_id=first_response.id)
        assert item_types(second_response) == ["message"]  # the tools are already listed
        expected_call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
        assert f"user: Addassistant: {expected_call}tool: 5assistant: 5user: And?" in prompts[0]
        items = [item.to_dict() for item in first_response.output]
        continued_response = await create(
            server, [{"role": "user", "content": "Add"}, *items, _make_user_message("And?")]
        )
        assert item_types(continued_response) == ["message"]
        assert tools.num_list_requests == num_list_requests_before


def _make_user_message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def test_a_function_call_of_the_client_ends_the_response(tools: ServedTools) -> None:
    async with run_server(tools, call_text("add", a=1, b=2) + call_text("get_weather"), "Good.") as server:
        response = await create(server, tools=[CALC, WEATHER])
        assert item_types(response) == ["mcp_list_tools", "mcp_call", "function_call"]
        assert (response.output[1].output, response.status) == ("3", "completed")
        call_id = response.output[2].call_id
        output: Any = {"type": "function_call_output", "call_id": call_id, "output": "sunny"}
        fields: Any = {"previous_response_id": response.id, "tools": [CALC, WEATHER]}
        assert (await create(server, [output], **fields)).output_text == "Good."


async def test_tools_with_the_name_of_a_function_are_renamed_for_the_model(tools: ServedTools) -> None:
    own_tool = {**WEATHER, "name": "add"}
    calls = call_text("calc_add", a=1, b=2) + call_text("get_picture")
    async with run_server(tools, calls, "x", "Good.") as server:
        response = await create(server, tools=[own_tool, CALC])
        assert [(item.type, item.name) for item in response.output[1:3]] == [
            ("mcp_call", "add"),
            ("mcp_call", "get/picture"),
        ]
        assert response.output[2].output == "A dot:\n[image image/png, not text]"


@pytest.mark.parametrize("stream", [False, True])
async def test_only_an_approved_call_is_executed_and_only_once(tools: ServedTools, stream: bool) -> None:
    calc_with_approval = {**CALC, "require_approval": "always"}
    async with run_server(tools, call_text("add", a=2, b=3), "Done.") as server:
        pending_response = await create(server, tools=[calc_with_approval])
        assert item_types(pending_response) == ["mcp_list_tools", "mcp_approval_request"]
        request = pending_response.output[1]
        assert (request.name, request.server_label) == ("add", "calc")
        assert json.loads(request.arguments) == {"a": 2, "b": 3}
        assert not tools.calls
        reply: Any = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": True}
        fields: Any = {"tools": [calc_with_approval], "previous_response_id": pending_response.id}
        if stream:
            http_response = await server.post("/v1/responses", input=[reply], stream=True, **fields)
            response = parse_events(http_response.text)[-1]["response"]
        else:
            response = (await create(server, [reply], **fields)).to_dict()
        call_item, message = response["output"]
        assert (call_item["type"], call_item["output"], call_item["approval_request_id"]) == (
            "mcp_call",
            "5",
            request.id,
        )
        assert message["content"][0]["text"] == "Done."
        assert tools.calls == [("add", (2, 3))]
        items: Any = [
            _make_user_message("Add"),
            *(item.to_dict() for item in pending_response.output),
            reply,
            *response["output"],
        ]
        assert (
            await create(server, [*items, _make_user_message("And?")], tools=[calc_with_approval])
        ).output_text == "Done."
        assert len(tools.calls) == 1  # the approved call is not repeated
        with record_prompts(server) as prompts:
            refused_response = await create(
                server, [{**reply, "approve": False, "reason": "too dear"}], **fields
            )
        assert (item_types(refused_response), refused_response.output_text) == (["message"], "Done.")
        assert len(tools.calls) == 1
        assert prompts[0].endswith("tool: Error: the user has not approved this call: too dearassistant: ")
        http_response = await server.post(
            "/v1/responses", input=[{**reply, "approval_request_id": "x"}], **fields
        )
        assert http_response.json()["error"]["param"] == "input[0].approval_request_id"


async def test_rules_select_the_calls_that_need_approval(tools: ServedTools) -> None:
    rules: list[tuple[Any, bool]] = [
        ("never", False),
        ("always", True),
        ({"never": {"tool_names": ["add"]}}, False),
        ({"never": {"tool_names": ["fail"]}}, True),
        ({"always": {"tool_names": ["add"]}}, True),
        ({"always": {"read_only": False}}, False),
        (None, False),
    ]
    async with run_server(tools, call_text("add", a=2, b=3), "Done.") as server:
        for rule, needs_approval in rules:
            tools.calls.clear()
            response = await create(server, tools=[{**CALC, "require_approval": rule}])
            assert ("mcp_approval_request" in item_types(response)) is needs_approval, rule
            assert bool(tools.calls) is not needs_approval, rule


async def test_calls_need_approval_if_mcp_require_approval_is_always(tools: ServedTools) -> None:
    text = call_text("add", a=2, b=3)
    async with run_server(tools, text, "Done.", mcp_require_approval="always") as server:
        assert item_types(await create(server))[1] == "mcp_approval_request"


async def test_only_allowed_tools_are_listed(tools: ServedTools) -> None:
    async with run_server(tools, "Hi") as server:
        for allowed_tools, names in (
            (["add", "slow"], ["add", "slow"]),
            ({"read_only": True}, ["add"]),
            ({"tool_names": ["fail"]}, ["fail"]),
        ):
            response = await create(server, tools=[{**CALC, "allowed_tools": allowed_tools}])
            assert [tool.name for tool in response.output[0].tools] == names


async def test_tool_choice_selects_the_tools_and_refuses_unknown_names(tools: ServedTools) -> None:
    async with run_server(tools, "Hi") as server:
        plain_response = await create(server, tool_choice="none")
        assert item_types(plain_response) == ["message"]
        refusal_error = await server.expect_refusal(
            "/v1/responses",
            input="Hi",
            tool_choice={"type": "mcp", "server_label": "calc", "name": "multiply"},
        )
        assert refusal_error["param"] == "tool_choice.name"
        refusal_error = await server.expect_refusal(
            "/v1/responses", input="Hi", tool_choice={"type": "mcp", "server_label": "other"}
        )
        assert refusal_error["param"] == "tool_choice.server_label"
        tool_choice = {"mode": "auto", "type": "allowed_tools", "tools": [CALC]}
        assert item_types(await create(server, tool_choice=tool_choice)) == ["mcp_list_tools", "message"]


@pytest.mark.parametrize("names_tool", [False, True])
async def test_tool_choice_forces_a_call_only_in_the_first_turn(tools: ServedTools, names_tool: bool) -> None:
    tool_choice: Any = {"type": "mcp", "server_label": "calc", **({"name": "add"} if names_tool else {})}
    async with run_server(tools, call_text("add", a=2, b=3), "It is 5.", grammars_enabled=True) as server:
        with pytest.MonkeyPatch.context() as patch:
            # The fake model supports no grammars.
            patch.setattr("penstock.serve.api.conversation._grammar", lambda *_: None)
            parser_choices: list[Any] = []
            new_parser = server.services.parsers.new

            def record_tool_choices(**options: Any) -> Any:
                parser_choices.append(options["tool_choice"])
                return new_parser(**options)

            object.__setattr__(server.services.parsers, "new", record_tool_choices)
            response = await create(server, tool_choice=tool_choice)
            assert (parser_choices[0] == "auto", parser_choices[1]) == (False, "auto")
        assert item_types(response) == ["mcp_list_tools", "mcp_call", "message"]
        assert (response.output[1].output, response.output_text) == ("5", "It is 5.")


async def test_the_numbers_of_turns_and_calls_are_limited(tools: ServedTools) -> None:
    """After the limit, the prompt contains no tools. The model calls a tool if the prompt contains tools."""

    def answer(prompt: str) -> str:
        return call_text("add", a=1, b=1) if "<tools>" in prompt else "I stop."

    model = FakePipeline.answering(answer)
    async with run_in_process(model, mcp_server=(f"calc={tools.url}",), mcp_max_turns=3) as server:
        response = await create(server)
        assert item_types(response) == ["mcp_list_tools", *["mcp_call"] * 3, "message"]
        assert (response.output_text, response.status) == ("I stop.", "completed")
        limited_response = await create(server, max_tool_calls=1)
        assert item_types(limited_response) == ["mcp_list_tools", "mcp_call", "message"]
        assert limited_response.max_tool_calls == 1


async def test_calls_beyond_max_tool_calls_fail(tools: ServedTools) -> None:
    async with run_server(tools, call_text("add", a=1, b=1) * 2, "x", "Done.") as server:
        response = await create(server, max_tool_calls=1)
        _, first_call, second_call, _ = response.output
        assert (first_call.status, second_call.status) == ("completed", "failed")
        assert "max_tool_calls, 1" in second_call.error.message
        assert len(tools.calls) == 1


async def test_max_output_tokens_applies_to_all_turns(tools: ServedTools) -> None:
    text = call_text("add", a=1, b=1)
    async with run_server(tools, text, "It is two.") as server:
        response = await create(server, max_output_tokens=len(text) + 1 + 5)
        assert (response.status, response.output_text) == ("incomplete", "It is")
        assert response.incomplete_details.reason == "max_output_tokens"
        response = await create(server, max_output_tokens=len(text) + 1)
        assert (response.status, item_types(response)) == ("incomplete", ["mcp_list_tools", "mcp_call"])
        response = await create(server, max_output_tokens=len(text) - 20)
        assert response.status == "incomplete"
        assert (response.output[-1].type, response.output[-1].status) == ("mcp_call", "incomplete")
        assert len(tools.calls) == 2


async def test_a_tool_output_that_exceeds_the_maximum_length_ends_the_response(tools: ServedTools) -> None:
    async with run_server(tools, call_text("long"), "Done.") as server:
        server.services.tokenizer.max_length = 2048
        response = await create(server)
        assert (response.status, item_types(response)) == ("incomplete", ["mcp_list_tools", "mcp_call"])
        assert response.output[1].output.startswith("xxx")


async def test_an_argument_of_a_wrong_type_fails_the_call(tools: ServedTools) -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x"}}</tool_call>'
    async with run_server(tools, text, "Done.") as server:
        response = await create(server)
        assert response.output[1].status == "failed"
        assert response.output_text == "Done."


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unreachable_tool_server_is_reported_in_the_output(stream: bool) -> None:
    model = FakePipeline.saying("Hello!")
    with broken_server() as url:
        async with run_in_process(model, mcp_server=("a=http://127.0.0.1:9/mcp", f"b={url}")) as server:
            if stream:
                http_response = await server.post("/v1/responses", input="Hi", stream=True)
                events = parse_events(http_response.text)
                assert [event["type"] for event in events].count("response.mcp_list_tools.failed") == 2
                response = openai.types.responses.Response.model_validate(events[-1]["response"])
            else:
                response = await create(server, "Hi")
            assert item_types(response) == ["mcp_list_tools", "mcp_list_tools", "message"]
            for item in response.output[:2]:
                assert "cannot be used" in item.error  # type: ignore[union-attr,operator]
            assert response.status == "completed"


async def test_a_call_that_exceeds_the_time_limit_fails(tools: ServedTools) -> None:
    async with run_server(tools, call_text("slow"), "Done.", mcp_timeout=0.4, stream_ping=0.1) as server:
        http_response = await server.post("/v1/responses", input="Hi", stream=True)
        assert ": ping" in http_response.text
        response = parse_events(http_response.text)[-1]["response"]
        assert response["output"][1]["error"]["code"] == 504
        assert response["output"][2]["content"][0]["text"] == "Done."


async def test_tools_are_called_in_background_responses(tools: ServedTools) -> None:
    async with run_server(tools, call_text("add", a=2, b=3), "5") as server:
        response = await create(server, background=True)
        async with asyncio.timeout(30):
            while (response := await server.openai.responses.retrieve(response.id)).status != "completed":
                await asyncio.sleep(0.01)
        assert item_types(response) == ["mcp_list_tools", "mcp_call", "message"]


async def test_a_response_is_cancelled_during_a_call(tools: ServedTools) -> None:
    limits = {"mcp_timeout": 1000.0, "stream_ping": 1000.0}  # the call must still run at the cancellation
    async with run_server(tools, call_text("slow"), "Done.", **limits) as server:
        response = await create(server, background=True)
        async with asyncio.timeout(30):
            while not tools.calls:
                await asyncio.sleep(0.01)
        cancelled_response = await server.openai.responses.cancel(response.id)
        assert cancelled_response.status == "cancelled"
        assert (cancelled_response.output[-1].type, cancelled_response.output[-1].status) == (
            "mcp_call",
            "incomplete",
        )
        assert server.services.gate.num_active == 0


REFUSED_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"server_label": "other"}, "tools[0].server_label"),
    ({"server_label": "calc", "server_url": "http://169.254.169.254/mcp"}, "tools[0].server_url"),
    ({"server_label": "calc", "headers": {"a": "b"}}, "tools[0].headers"),
    ({"server_label": "calc", "authorization": "x"}, "tools[0].authorization"),
    ({"server_label": "calc", "connector_id": "connector_gmail"}, "tools[0].connector_id"),
    ({"server_label": "calc", "allowed_tools": ["multiply"]}, "tools[0].allowed_tools"),
    ({"server_label": "calc", "colour": 1}, "tools[0].colour"),
    ({"server_label": "calc", "require_approval": "maybe"}, "tools[0].require_approval"),
    ({}, "tools[0].server_label"),
]


async def test_invalid_mcp_tools_are_refused_with_the_name_of_the_field(tools: ServedTools) -> None:
    async with run_server(tools, "Hi") as server, run_in_process() as other_server:
        for tool_fields, param in REFUSED_TOOLS:
            body = {"input": "Hi", "tools": [{"type": "mcp", **tool_fields}]}
            assert (await server.expect_refusal("/v1/responses", **body))["param"] == param
            assert (await other_server.expect_refusal("/v1/responses", **body))["param"].startswith(
                "tools[0]."
            )


async def test_a_server_is_accepted_by_its_url_and_a_repeated_label_is_refused(tools: ServedTools) -> None:
    async with run_server(tools, "Hi") as server:
        response = await create(server, tools=[{**CALC, "server_label": "mine", "server_url": tools.url}])
        assert response.output[0].server_label == "mine"
        duplicate_error = await server.expect_refusal("/v1/responses", input="Hi", tools=[CALC, CALC])
        assert duplicate_error["param"] == "tools[1].server_label"


async def test_a_template_without_tools_disables_tool_servers(
    tools: ServedTools, caplog: pytest.LogCaptureFixture
) -> None:
    plain_template = HERMES.replace("tools", "no_such_name")
    async with run_server(tools, "Hi", template=plain_template) as server:
        assert item_types(await create(server)) == ["message"]
        assert [message for message in caplog.messages if "tool servers" in message]


async def test_concurrent_requests_share_the_tool_lists(tools: ServedTools) -> None:
    async with run_server(tools, "Hi") as server:
        num_list_requests_before = tools.num_list_requests
        await asyncio.gather(*(create(server) for _ in range(4)))
        assert tools.num_list_requests <= num_list_requests_before + 1
