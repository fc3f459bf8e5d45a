"""Output constrained by grammars, over HTTP, with the demo model and a real worker."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from support.in_process_server import InProcessServer, parse_events, run_in_process, user_message

from penstock.assembly import load_runtime, load_tokenizer
from penstock.config import PipelineConfig
from penstock.grammar import llguidance_backend
from penstock.grammar.schema import sources
from penstock.pipelines.core import Grammar
from penstock.text.tokenizer import TextTokenizer

pytest.importorskip("llguidance")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "degrees": {"type": "integer", "minimum": -50, "maximum": 50},
        "sky": {"enum": ["clear", "grey"]},
    },
    "required": ["city", "degrees", "sky"],
    "additionalProperties": False,
}
STRICT_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather", "strict": True, "parameters": SCHEMA},
}
PLAIN_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time",
        "parameters": {"type": "object", "properties": {"zone": {"type": "integer"}}},
    },
}
PARIS = [user_message("What's the weather like in Paris today?")]
CHAT = "/v1/chat/completions"


def make_config(**fields: Any) -> PipelineConfig:
    return PipelineConfig.from_flat(
        {"model_path": "demo", "kv_cache_memory": 32 * 2**20, "max_length": 1024, **fields}
    )


@asynccontextmanager
async def serve_demo(in_thread: bool = True, **fields: Any) -> AsyncIterator[InProcessServer]:
    config = make_config(**fields)
    tokenizer: TextTokenizer = load_tokenizer(config)
    make_runtime = partial(load_runtime, config)
    async with run_in_process(
        make_runtime=make_runtime, tokenizer=tokenizer, pipeline_config=config, in_thread=in_thread
    ) as server:
        tokenizer.max_length = server.services.worker.info.max_length
        yield server


def message_text(answer: dict[str, Any]) -> str:
    content = answer["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


async def post_stream(server: InProcessServer, **body: Any) -> dict[str, Any]:
    """Post a streaming request and return the message that is joined from its chunks."""
    response = await server.post(CHAT, **{"messages": PARIS, "stream": True, **body})
    assert response.status_code == 200, response.text
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for chunk in parse_events(response.text)[:-1]:
        delta = chunk["choices"][0]["delta"]
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message


def function_calls(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [call["function"] for call in answer["choices"][0]["message"]["tool_calls"]]


def without_strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": None}}


def make_json_schema_format(schema: dict[str, Any] = SCHEMA) -> dict[str, Any]:
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "strict": True, "schema": schema},
        }
    }


TAG = {
    "type": "tag",
    "begin": "<a>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "</a>",
}
FORMATS: list[tuple[dict[str, Any], Any]] = [
    (make_json_schema_format(), lambda text: jsonschema.validate(json.loads(text), SCHEMA)),
    ({"structured_outputs": {"json": SCHEMA}}, lambda text: jsonschema.validate(json.loads(text), SCHEMA)),
    (
        {"structured_outputs": {"regex": "[A-D]{3}-[0-9]{2}"}},
        lambda text: re.fullmatch("[A-D]{3}-[0-9]{2}", text) is not None,
    ),
    ({"structured_outputs": {"choice": ["sunny", "grey"]}}, ["sunny", "grey"].index),
    (
        {"structured_outputs": {"grammar": 'root ::= "x" [0-9]{1,3} "y"'}},
        lambda text: re.fullmatch("x[0-9]{1,3}y", text) is not None,
    ),
    (
        {"response_format": {"type": "structural_tag", "format": TAG}},
        lambda text: jsonschema.validate(json.loads(text[3:-4]), SCHEMA),
    ),
]


async def check_formats(server: InProcessServer) -> None:
    """Check the outputs of all `FORMATS`, and check that streams return equal texts.

    Unconstrained requests run at the same time. Their texts must equal the text of a request that runs alone.
    """
    grammar_fields: dict[str, Any] = {"messages": PARIS, "seed": 1, "temperature": 1.0, "max_tokens": 200}
    plain_fields = {"messages": PARIS, "seed": 2, "max_tokens": 30}
    single_response = await server.chat(**plain_fields)
    answers = await asyncio.gather(
        *(server.chat(**grammar_fields, **format_fields) for format_fields, _ in FORMATS),
        *(server.chat(**plain_fields) for _ in range(2)),
    )
    for (format_fields, check_text), answer in zip(FORMATS, answers, strict=False):
        assert answer["choices"][0]["finish_reason"] == "stop", format_fields
        assert check_text(message_text(answer)) is not False, (format_fields, message_text(answer))
    assert {message_text(answer) for answer in answers[len(FORMATS) :]} == {message_text(single_response)}
    streamed_messages = await asyncio.gather(
        *(post_stream(server, **grammar_fields, **format_fields) for format_fields, _ in FORMATS)
    )
    assert [message["content"] for message in streamed_messages] == [
        message_text(answer) for answer in answers[: len(FORMATS)]
    ]
    completion = await server.complete(prompt="x", structured_outputs={"regex": "[ab]{5}"}, max_tokens=20)
    assert re.fullmatch("[ab]{5}", completion["choices"][0]["text"])


async def check_tools(server: InProcessServer) -> None:
    """Check forced calls, strict calls with the choice "auto", and outputs that are a call or JSON."""
    tools = {"tools": [STRICT_TOOL, PLAIN_TOOL], "messages": PARIS, "seed": 1, "max_tokens": 200}
    tool_choice = {"type": "function", "function": {"name": "get_weather"}}
    choices: list[Any] = ["required", tool_choice]
    for temperature in (0, 1):
        for choice in choices:
            body = {**tools, "tool_choice": choice, "temperature": temperature, "parallel_tool_calls": False}
            answer = await server.chat(**body)
            [call] = function_calls(answer)
            schema = SCHEMA if call["name"] == "get_weather" else PLAIN_TOOL["function"]["parameters"]
            jsonschema.validate(json.loads(call["arguments"]), schema)
            assert (await post_stream(server, **body))["tool_calls"] == [call]
    answer = await server.chat(**tools, temperature=0)
    [call] = function_calls(answer)
    jsonschema.validate(json.loads(call["arguments"]), SCHEMA)
    assert json.loads(call["arguments"])["city"] == "Paris"
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert (await post_stream(server, **tools, temperature=0))["tool_calls"] == [call]
    body = {**tools, "messages": [user_message("Hi")], "temperature": 0}
    assert message_text(await server.chat(**body)) == message_text(
        await server.chat(**{**body, "tools": [without_strict(STRICT_TOOL), PLAIN_TOOL]})
    )

    call_or_json = await server.chat(**tools, temperature=0, response_format={"type": "json_object"})
    message = call_or_json["choices"][0]["message"]
    if message.get("tool_calls"):
        jsonschema.validate(json.loads(function_calls(call_or_json)[0]["arguments"]), SCHEMA)
    else:
        assert isinstance(json.loads(message["content"]), dict)


class Weather(pydantic.BaseModel):
    """The weather of a city"""

    city: Annotated[str, pydantic.Field(max_length=20)]
    degrees: Annotated[int, pydantic.Field(ge=-50, le=50)]
    sky: Literal["clear", "grey"]


async def check_openai_parse_helpers(server: InProcessServer) -> None:
    """Check the parse helpers of the OpenAI client, which send strict tools and schemas."""
    client: Any = server.openai.chat.completions
    body = {"model": "demo", "messages": PARIS, "seed": 1, "max_tokens": 200, "temperature": 0}
    answer = await client.parse(**body, tools=[openai.pydantic_function_tool(Weather)])
    [call] = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    answer = await client.parse(**body, response_format=Weather)
    assert isinstance(answer.choices[0].message.parsed, Weather)


async def check_errors(server: InProcessServer) -> None:
    """Check that invalid grammars get status 400, also for a stream, and that errors name the problem."""
    unsupported = {"type": "array", "uniqueItems": True}
    refused_requests: list[tuple[dict[str, Any], str, str]] = [
        (make_json_schema_format(unsupported), "response_format.json_schema", "uniqueItems"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "regular expression"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        (make_json_schema_format() | {"ignore_eos": True}, "ignore_eos", "stop_token_ids"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schem": {}}}},
            "response_format.json_schema.schem",
            "did you mean schema?",
        ),
    ]
    for format_fields, param, error_text in refused_requests:
        for stream in (False, True):
            error = await server.expect_refusal(CHAT, messages=PARIS, stream=stream, **format_fields)
            assert error["param"] == param
            assert error_text in error["message"]
    for format_fields in (
        {"structured_outputs": {"grammar": "root ::= ("}},
        {"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": {"type": "no"}}}},
    ):
        for stream in (False, True):  # compilation detects these errors
            response = await server.post(CHAT, messages=PARIS, stream=stream, **format_fields)
            assert response.status_code == 400, response.text
            assert "not valid" in response.text or "no format 'no'" in response.text, response.json()[
                "error"
            ]["message"]
            assert response.headers["content-type"].startswith("application/json")


async def test_the_demo_model_follows_grammars() -> None:
    async with serve_demo() as server:
        await check_formats(server)
        await check_tools(server)
        await check_errors(server)
        await check_openai_parse_helpers(server)
        await check_with_other_fields(server)


async def test_a_worker_process_follows_grammars() -> None:
    async with serve_demo(in_thread=False) as server:
        await check_formats(server)
        await check_tools(server)
        await check_errors(server)


async def check_with_other_fields(server: InProcessServer) -> None:
    """Check that an output ends at the end of its grammar, also with request fields that affect sampling.

    With ``ignore_eos``, or if ``allowed_token_ids`` contains no token that the grammar allows, the response
    must be an error.
    """
    choice_format = {"structured_outputs": {"choice": ["yes", "no"]}}
    fields = {"messages": PARIS, "max_tokens": 50, **choice_format}
    results = await asyncio.gather(
        server.chat(messages=PARIS, seed=5, max_tokens=30),
        server.chat(**fields, min_tokens=20),
        server.chat(**fields, logit_bias={"5": 100}),
        server.chat(**fields, n=3, logprobs=True, top_logprobs=2, temperature=1),
        server.post(CHAT, **fields, ignore_eos=True),
        server.post(CHAT, **fields, allowed_token_ids=[5, 6]),
        server.post(CHAT, **fields, allowed_token_ids=[5, 6], stream=True),
        server.chat(**fields, allowed_token_ids=server.services.tokenizer.encode_text("yes", False).tolist()),
    )
    (
        plain_answer,
        min_tokens_answer,
        bias_answer,
        three_choices,
        ignore_eos_response,
        stuck_response,
        stuck_stream,
        allowed_answer,
    ) = results
    assert message_text(allowed_answer) == "yes"
    assert message_text(plain_answer) == message_text(
        await server.chat(messages=PARIS, seed=5, max_tokens=30)
    )
    for answer in (min_tokens_answer, bias_answer):
        assert message_text(answer) in ("yes", "no")
        assert answer["choices"][0]["finish_reason"] == "stop"
    for item in three_choices["choices"]:
        assert item["message"]["content"] in ("yes", "no")
        scores = item["logprobs"]["content"]
        assert "".join(score["token"] for score in scores) == item["message"]["content"]
        assert all(len(score["top_logprobs"]) == 2 for score in scores)
    assert ignore_eos_response.status_code == 400
    assert "ignore_eos" in ignore_eos_response.json()["error"]["message"]
    assert stuck_response.status_code == 400, stuck_response.text
    for response in (stuck_response, stuck_stream):
        assert "the grammar allows none of the tokens that" in response.text


async def test_the_size_and_compile_time_of_grammars_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    may_compile = threading.Event()

    def compile_slowly(grammar: Grammar, **options: Any) -> sources.GrammarSource:
        may_compile.wait(60)
        return sources.grammar_source(grammar, **options)

    monkeypatch.setattr(llguidance_backend, "grammar_source", compile_slowly)
    async with serve_demo(max_grammar_size=1500, grammar_compile_timeout=0.05) as server:
        long_choice = {"structured_outputs": {"choice": ["a" * 3000]}}
        error = await server.expect_refusal(CHAT, messages=PARIS, **long_choice)
        assert "the maximum is 1500" in error["message"]
        assert error["param"] == "structured_outputs.choice"
        wide_schema = {"type": "object", "properties": {"x": {"enum": ["the " * 400]}}}
        function = {"name": "f", "parameters": wide_schema, "strict": True}
        error = await server.expect_refusal(
            CHAT, messages=PARIS, tools=[{"type": "function", "function": function}]
        )
        assert error["param"] == "tools[0].function.parameters", "the size is checked before parsing"
        assert "the maximum is 1500" in error["message"]
        tools = [
            {**STRICT_TOOL, "function": {**STRICT_TOOL["function"], "name": f"f{index}"}}
            for index in range(6)
        ]
        error = await server.expect_refusal(CHAT, messages=PARIS, tools=tools, tool_choice="required")
        assert error["param"] == "tools"
        for stream in (False, True):
            regex_format = {"structured_outputs": {"regex": "ab"}}
            error = await server.expect_refusal(CHAT, messages=PARIS, stream=stream, **regex_format)
            assert "within 0.05 s" in error["message"]
        may_compile.set()


async def test_reasoning_precedes_formatted_output(tmp_path: Any) -> None:
    """The chat template opens a reasoning block, so the model must reason before its output."""
    template = tmp_path / "template.jinja"
    source = load_tokenizer(make_config()).chat_template_source
    assert source is not None
    template.write_text(
        f"{{# <think> </think> #}}{source}{{% if add_generation_prompt %}}<think>\n{{% endif %}}"
    )
    async with serve_demo(chat_template=str(template)) as server:
        assert server.services.parsers.reasoning_format_name == "think"
        bias = {str(server.services.tokenizer.encode_text("</", False).tolist()[0]): 3.0}
        for seed in range(3):
            body = {
                "messages": PARIS,
                "seed": seed,
                "temperature": 1.0,
                "max_tokens": 300,
                "logit_bias": bias,
            }
            answer = await server.chat(**body, **make_json_schema_format())
            [choice] = answer["choices"]
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
