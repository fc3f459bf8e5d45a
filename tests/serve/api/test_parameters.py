"""OpenAI's fields are supported, logged, or refused by name. Unknown fields are refused or ignored."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import chat_completion_stream_options_param
from openai.types.chat import completion_create_params as chat_params
from support.in_process_server import InProcessServer, run_in_process, user_message

from penstock.serve.api.parameters import LOGGED_FIELDS, UNSUPPORTED
from penstock.serve.api.schemas import ChatBody, CompletionBody, RequestBody, StreamOptions
from penstock.serve.api.validation import validated
from penstock.serve.http.problems import RequestProblem

ROUTES_AND_BODIES: dict[type[RequestBody], tuple[str, dict[str, Any]]] = {
    ChatBody: ("/v1/chat/completions", {"messages": [user_message("Hi")]}),
    CompletionBody: ("/v1/completions", {"prompt": "Hi"}),
}
UNSUPPORTED_FIELDS = [(kind, name) for kind in ROUTES_AND_BODIES for name in UNSUPPORTED[kind]]


def field_names(*classes: type) -> set[str]:
    return {name for request_class in classes for name in typing.get_type_hints(request_class)}


@pytest.mark.parametrize(
    ("request_class", "openai_fields"),
    [
        (
            ChatBody,
            field_names(
                chat_params.CompletionCreateParamsNonStreaming, chat_params.CompletionCreateParamsStreaming
            ),
        ),
        (
            CompletionBody,
            field_names(
                completion_create_params.CompletionCreateParamsNonStreaming,
                completion_create_params.CompletionCreateParamsStreaming,
            ),
        ),
        (StreamOptions, field_names(chat_completion_stream_options_param.ChatCompletionStreamOptionsParam)),
    ],
)
def test_each_openai_field_is_declared_or_listed_as_unsupported(
    request_class: type[RequestBody], openai_fields: set[str]
) -> None:
    assert len(openai_fields) > 1
    unsupported_fields = UNSUPPORTED.get(request_class, {}).keys()
    assert openai_fields - request_class.model_fields.keys() - unsupported_fields == set()


def test_unsupported_fields_are_not_declared_and_logged_fields_are_declared() -> None:
    for request_class, table in UNSUPPORTED.items():
        assert not request_class.model_fields.keys() & table.keys()
    assert set(LOGGED_FIELDS) <= ChatBody.model_fields.keys() & CompletionBody.model_fields.keys()


@pytest.mark.parametrize(("request_class", "name"), UNSUPPORTED_FIELDS)
async def test_an_unsupported_field_is_refused_unless_its_value_is_null_or_listed(
    request_class: type[RequestBody], name: str
) -> None:
    path, body = ROUTES_AND_BODIES[request_class]
    async with run_in_process() as server:
        for value in (None, *UNSUPPORTED[request_class][name].accepted):
            response = await server.post(path, **body, **{name: value})
            assert response.status_code == 200, response.text
        for value in (True, 7, "else", ["audio"], {"a": 1}):
            if any(
                type(value) is type(accepted) and value == accepted
                for accepted in UNSUPPORTED[request_class][name].accepted
            ):
                continue
            error = await server.expect_refusal(path, **body, **{name: value})
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
            assert error["type"] == "invalid_request_error"
            assert name in error["message"]


DEFAULTS: dict[str, Any] = {
    "store": False,
    "service_tier": "auto",
    "modalities": ["text"],
    "logit_bias": {},
    "n": 1,
    "logprobs": False,
    "parallel_tool_calls": True,
    "prediction": None,
    "audio": None,
    "web_search_options": None,
    "verbosity": "medium",
    "reasoning_effort": "none",
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "tools": [],
    "functions": None,
    "stream": False,
    "stream_options": None,
    "metadata": {},
    "stop": None,
    "seed": None,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "structured_outputs": None,
    "chat_template_kwargs": {},
    "ignore_eos": False,
    "priority": 0,
    "max_tokens": None,
}


async def test_default_values_are_accepted() -> None:
    async with run_in_process() as server:
        for name, value in DEFAULTS.items():
            answer = await server.chat(**{name: value})
            assert answer["choices"][0]["message"]["content"] == "Hello!", name
        assert (await server.chat(**DEFAULTS))["choices"][0]["finish_reason"] == "stop"
        assert (await server.complete(suffix=None, best_of=1, echo=False, logprobs=None))["choices"]
        assert (await server.complete(n=2, best_of=2))["choices"]


async def test_null_is_accepted_for_each_optional_field() -> None:
    async with run_in_process() as server:
        required_fields = {"model", "messages", "prompt"}
        for request_class, (path, body) in ROUTES_AND_BODIES.items():
            null_fields = dict.fromkeys(
                [*request_class.model_fields.keys() - required_fields, *UNSUPPORTED[request_class]]
            )
            response = await server.post(path, **body, **null_fields)
            assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat", {"temperture": 1}, "temperture"),
        ("chat", {"messages": [{**user_message("Hi"), "colour": 1}]}, "messages[0].colour"),
        (
            "chat",
            {"messages": [user_message([{"type": "text", "text": "a", "cache": 1}])]},
            "messages[0].content[0].cache",
        ),
        (
            "chat",
            {"stream": True, "stream_options": {"include_usages": True}},
            "stream_options.include_usages",
        ),
        ("chat", {"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
        ("chat", {"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ("completion", {"prompts": "a"}, "prompts"),
        ("completion", {"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
async def test_an_unknown_field_is_refused_or_ignored(
    path: str, fields: dict[str, Any], param: str, caplog: pytest.LogCaptureFixture
) -> None:
    request_class = ChatBody if path == "chat" else CompletionBody
    route, body = ROUTES_AND_BODIES[request_class]
    async with run_in_process() as server:
        error = await server.expect_refusal(route, **{**body, **fields})
        assert (error["param"], error["code"]) == (param, "unknown_parameter")
    async with run_in_process(unknown_fields="warn") as server:
        response = await server.post(route, **{**body, **fields})
        assert response.status_code == 200, response.text
        assert param in caplog.text
        assert (await server.expect_refusal(route, **{**body, **fields, "store": 1}))["param"] == "store"


async def test_the_nearest_name_is_suggested() -> None:
    async with run_in_process() as server:
        error = await server.expect_refusal(
            "/v1/chat/completions", messages=[user_message("Hi")], max_token=5
        )
        assert error["message"].endswith("did you mean max_tokens?")


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
INVALID_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"temperature": 2.1}, "temperature"),
    ("chat", {"temperature": -0.1}, "temperature"),
    ("chat", {"temperature": "1"}, "temperature"),
    ("chat", {"temperature": True}, "temperature"),
    ("chat", {"top_p": 1.01}, "top_p"),
    ("chat", {"top_k": -2}, "top_k"),
    ("chat", {"top_k": 1.5}, "top_k"),
    ("chat", {"min_p": 2}, "min_p"),
    ("chat", {"presence_penalty": 3}, "presence_penalty"),
    ("chat", {"frequency_penalty": -3}, "frequency_penalty"),
    ("chat", {"repetition_penalty": 0}, "repetition_penalty"),
    ("chat", {"seed": 2**64}, "seed"),
    ("chat", {"seed": -(2**63) - 1}, "seed"),
    ("chat", {"seed": 1.0}, "seed"),
    ("chat", {"n": 0}, "n"),
    ("chat", {"n": 129}, "n"),
    ("chat", {"max_tokens": 0}, "max_tokens"),
    ("chat", {"max_completion_tokens": -1}, "max_completion_tokens"),
    ("chat", {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ("completion", {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ("chat", {"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ("chat", {"stop": 3}, "stop"),
    ("chat", {"stop": ["a", 3]}, "stop[1]"),
    ("chat", {"stop": ["a"] * 65}, "stop"),
    ("chat", {"stop": "a" * 3000}, "stop"),
    ("chat", {"stop_token_ids": [257]}, "stop_token_ids"),
    ("chat", {"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ("chat", {"allowed_token_ids": []}, "allowed_token_ids"),
    ("chat", {"allowed_token_ids": [900]}, "allowed_token_ids"),
    ("chat", {"logit_bias": {"900": 1}}, "logit_bias"),
    ("chat", {"logit_bias": {"a": 1}}, "logit_bias"),
    ("chat", {"logit_bias": {"-1": 1}}, "logit_bias"),
    ("chat", {"logit_bias": {"1": 101}}, "logit_bias.1"),
    ("chat", {"logit_bias": [1]}, "logit_bias"),
    ("chat", {"logprobs": 1}, "logprobs"),
    ("chat", {"top_logprobs": 3}, "top_logprobs"),
    ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("chat", {"stream": 1}, "stream"),
    ("chat", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("chat", {"tools": {}}, "tools"),
    ("chat", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ("chat", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ("chat", {"tool_choice": "required"}, "tool_choice"),
    ("chat", {"tool_choice": "always"}, "tool_choice"),
    ("chat", {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
    ("chat", {"reasoning_effort": "high"}, "reasoning_effort"),
    ("chat", {"reasoning_effort": "huge"}, "reasoning_effort"),
    ("chat", {"response_format": {"type": "xml"}}, "response_format.type"),
    ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
    ("chat", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        "chat",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schem": {}}}},
        "response_format.json_schema.schem",
    ),
    (
        "chat",
        {"response_format": {"type": "json_schema", "json_schema": {"name": 1, "schema": {}}}},
        "response_format.json_schema.name",
    ),
    (
        "chat",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
        "response_format.json_schema.strict",
    ),
    ("chat", {"structured_outputs": {}}, "structured_outputs"),
    ("chat", {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ("chat", {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ("chat", {"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ("chat", {"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ("chat", {"metadata": {"a": 1}}, "metadata.a"),
    ("chat", {"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ("chat", {"metadata": {"a": "b" * 513}}, "metadata.a"),
    ("chat", {"user": 5}, "user"),
    ("chat", {"user": "a" * 513}, "user"),
    ("completion", {"prompt_cache_key": "a" * 513}, "prompt_cache_key"),
    ("chat", {"max_tokens": 2**63}, "max_tokens"),
    ("completion", {"max_tokens": 2**63}, "max_tokens"),
    ("chat", {"max_completion_tokens": 10**30}, "max_completion_tokens"),
    ("completion", {"min_tokens": 2**63, "max_tokens": None}, "min_tokens"),
    ("chat", {"top_k": 2**64}, "top_k"),
    ("chat", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ("chat", {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ("chat", {"messages": []}, "messages"),
    ("chat", {"messages": None}, "messages"),
    ("chat", {"messages": [5]}, "messages[0]"),
    ("chat", {"messages": [user_message(5)]}, "messages[0].content"),
    ("chat", {"messages": [user_message([5])]}, "messages[0].content[0]"),
    ("chat", {"messages": [user_message([{"type": "text"}])]}, "messages[0].content[0]"),
    ("chat", {"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": "a" * 65, "content": "x"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": "a<|end|>", "content": "x"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": "ipython", "content": "x", "tool_calls": [CALL]}]}, "messages[0]"),
    ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
    ("chat", {"messages": [{"content": "x"}]}, "messages[0].role"),
    (
        "chat",
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ("completion", {"prompt": None}, "prompt"),
    ("completion", {"prompt": 5}, "prompt"),
    ("completion", {"prompt": []}, "prompt"),
    ("completion", {"prompt": ""}, "prompt"),
    ("completion", {"prompt": [[]]}, "prompt"),
    ("completion", {"prompt": ["a", ""]}, "prompt[1]"),
    ("completion", {"prompt": ["a", 5]}, "prompt[1]"),
    ("completion", {"prompt": [5, "a"]}, "prompt[0]"),
    ("completion", {"prompt": [[1], ["a"]]}, "prompt[1][0]"),
    ("completion", {"prompt": [257]}, "prompt"),
    ("completion", {"prompt": [-1]}, "prompt[0]"),
    ("completion", {"prompt": ["a"] * 200}, "prompt"),
    ("completion", {"logprobs": 21}, "logprobs"),
    ("completion", {"logprobs": True}, "logprobs"),
    ("completion", {"best_of": 3}, "best_of"),
    ("completion", {"best_of": 3, "n": 2}, "best_of"),
    ("completion", {"echo": "yes"}, "echo"),
    ("completion", {"max_tokens": -1}, "max_tokens"),
    ("chat", {"repeat_penalty": 0}, "repeat_penalty"),
    ("chat", {"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
    ("chat", {"bad_words": "a"}, "bad_words"),
    ("chat", {"bad_words": ["a", " "]}, "bad_words"),
    ("chat", {"bad_words": ["a"] * 257}, "bad_words"),
    ("completion", {"bad_words": ["a" * 20_000]}, "bad_words"),
    ("completion", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("chat", {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ("chat", {"prompt_logprobs": 21}, "prompt_logprobs"),
    ("chat", {"prompt_logprobs": -1}, "prompt_logprobs"),
    ("chat", {"guided_choice": []}, "guided_choice"),
    ("chat", {"guided_json": "{"}, "guided_json"),
    ("chat", {"guided_regex": "a"}, "guided_regex"),
    ("chat", {"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    ("chat", {"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
    ("chat", {"cache_prompt": False}, "cache_prompt"),
    ("chat", {"typical_p": 0.5}, "typical_p"),
    ("chat", {"reasoning": {"effort": "low"}}, "reasoning"),
]


async def test_invalid_values_are_refused_with_the_name_of_the_field() -> None:
    async with run_in_process() as server:
        for route_kind, fields, param in INVALID_FIELDS:
            path, body = ROUTES_AND_BODIES[ChatBody if route_kind == "chat" else CompletionBody]
            error = await server.expect_refusal(path, **{**body, **fields})
            assert error["param"] == param, (fields, error)
            assert error["type"] == "invalid_request_error"
            if not any(name.startswith("stream") for name in fields):
                assert await server.expect_refusal(path, **{**body, **fields, "stream": True}) == error


async def test_a_missing_required_field_is_refused() -> None:
    async with run_in_process() as server:
        for path, field in (("chat/completions", "messages"), ("completions", "prompt")):
            error = await server.expect_refusal(f"/v1/{path}")
            assert error["param"] == field
            assert error["code"] == "missing_required_parameter"


async def test_fields_without_effect_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with run_in_process() as server:
        answer = await server.chat(
            user="ann", metadata={"a": "b"}, safety_identifier="s1", prompt_cache_key="k1", seed=0
        )
        assert answer["choices"][0]["message"]["content"] == "Hello!"
    text = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    for value in ("ann", "s1", "k1"):
        assert value in text


async def test_no_state_of_refused_requests_remains() -> None:
    async with run_in_process() as server:
        await send_invalid_requests(server)
        assert server.services.worker.num_outstanding == 0
        assert server.pipeline.batches == []


async def send_invalid_requests(server: InProcessServer) -> None:
    for fields in ({"n": 0}, {"store": True}, {"stop": 1}):
        await server.expect_refusal("/v1/chat/completions", messages=[user_message("Hi")], **fields)


@pytest.mark.parametrize("index", [0, 1, 70, 199])
def test_the_error_names_the_invalid_message(index: int) -> None:
    messages: list[Any] = [{"role": "user", "content": "a"} for _ in range(200)]
    messages[index] = {"role": "user", "content": 5}
    messages[199] = {"role": "user", "content": 6}  # the first error is reported
    with pytest.raises(RequestProblem) as exc_info:
        validated(ChatBody, {"model": "demo", "messages": messages})
    assert exc_info.value.param == f"messages[{index}].content"


def test_the_validation_of_long_lists_returns_the_result_of_pydantic() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "x": 1} for _ in range(200)]
    body = {"model": "demo", "messages": messages}
    assert validated(ChatBody, body) == ChatBody.model_validate(body)
    assert validated(ChatBody, body).messages[7].model_extra == {"x": 1}


def test_too_many_fields_are_refused() -> None:
    with pytest.raises(RequestProblem, match="the body has 2001 fields; the maximum is 1000"):
        validated(ChatBody, {"model": "demo", **{str(number): 1 for number in range(2000)}})
