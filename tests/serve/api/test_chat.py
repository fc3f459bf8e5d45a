"""Chat completions: the exact OpenAI format of responses, and the effects of fields."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.asgi import wait_until
from support.in_process_server import HERMES, THINKING, parse_events, run_in_process, user_message

from penstock.pipelines.core import TextContext
from penstock.testing import FakePipeline, FakeTokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


async def test_a_response_has_the_openai_format() -> None:
    async with run_in_process() as server:
        answer = await server.chat(logprobs=True, top_logprobs=1)
        assert ChatCompletion.model_validate(answer).to_dict() == answer
        assert answer["id"].startswith("chatcmpl-")
        assert answer["object"] == "chat.completion"
        assert answer["usage"] == {
            "prompt_tokens": 19,
            "completion_tokens": 7,  # includes the EOS token
            "total_tokens": 26,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
        [choice] = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": "Hello!", "refusal": None}
        assert choice["finish_reason"] == "stop"
        expected_score = {"token": "H", "logprob": 0.0, "bytes": [72]}
        assert choice["logprobs"]["content"][0] == {**expected_score, "top_logprobs": [expected_score]}
        assert len(choice["logprobs"]["content"]) == 6
        second_answer = await server.chat()
        assert second_answer["id"] != answer["id"]
        assert second_answer["choices"][0]["logprobs"] is None


async def test_chunks_have_the_openai_format() -> None:
    async with run_in_process(FakePipeline.saying("Hi")) as server:
        response = await server.post(
            "/v1/chat/completions",
            messages=[user_message("x")],
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        *chunks, end_event = parse_events(response.text)
        assert end_event == "[DONE]"
        for chunk in chunks:
            assert ChatCompletionChunk.model_validate(chunk).to_dict() == chunk
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        roles = [
            chunk["choices"][0]["index"] for chunk in chunks[:-1] if "role" in chunk["choices"][0]["delta"]
        ]
        assert sorted(roles) == [0, 1]
        end_choices = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["finish_reason"]]
        assert [end_choice["delta"] for end_choice in end_choices] == [{}, {}]
        assert chunks[-1]["usage"]["completion_tokens"] == 6
        assert chunks[-1]["choices"] == []
        assert response.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    ("body", "text", "reason", "num_tokens"),
    [
        ({}, "abcdef", "stop", 7),
        ({"max_tokens": 6}, "abcdef", "length", 6),
        ({"max_completion_tokens": 2, "max_tokens": 2}, "ab", "length", 2),
        ({"stop": "cd"}, "ab", "stop", 4),
        ({"stop": ["x", "e", "bc"]}, "a", "stop", 3),
        ({"stop": ["cdx"]}, "abcdef", "stop", 7),
        ({"stop_token_ids": [ord("d")]}, "abc", "stop", 4),
        ({"ignore_eos": True, "max_tokens": 8}, "abcdef", "length", 8),
        ({"stop": "", "seed": -(2**63)}, "abcdef", "stop", 7),
        ({"logit_bias": {"97": -100}, "allowed_token_ids": [98]}, "abcdef", "stop", 7),
    ],
)
async def test_each_end_of_an_output_has_its_finish_reason(
    body: dict[str, Any], text: str, reason: str, num_tokens: int
) -> None:
    async with run_in_process(FakePipeline.saying("abcdef")) as server:
        answer = await server.chat(**body)
        [choice] = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason)
        assert answer["usage"]["completion_tokens"] == num_tokens


async def test_fields_are_set_on_the_context_of_the_worker() -> None:
    contexts: list[TextContext] = []

    def choose(context: TextContext) -> int:
        contexts.append(context)
        return FakeTokenizer.EOS

    async with run_in_process(FakePipeline(choose), adapters=("poet",)) as server:
        await server.chat(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.5,
            seed=0,
            min_tokens=0,
            max_tokens=9,
            stop=["x"],
            stop_token_ids=[5],
            logit_bias={"7": -3},
            allowed_token_ids=[1, 2],
            priority=3,
            cache_salt="salt",
            logprobs=True,
            top_logprobs=4,
        )
        await server.post("/v1/chat/completions", messages=[user_message("Hi")], model="poet", n=3, seed=7)
    first_context, *poet_contexts = contexts
    params = first_context.sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.25, 7, 0.125)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (
        1,
        -1,
        1.5,
    )
    assert (params.seed, params.stop, params.stop_token_ids) == (0, ["x"], [5])
    assert (params.logit_bias, params.allowed_token_ids) == ({7: -3.0}, [1, 2])
    assert first_context.max_length == len(first_context.prompt_tokens) + 9
    assert (first_context.priority, first_context.cache_salt) == (3, "salt")
    assert (first_context.log_probabilities, first_context.adapter) == (4, None)
    assert [context.adapter for context in poet_contexts] == ["poet"] * 3
    assert len({context.sampling_params.seed for context in poet_contexts}) == 3
    assert poet_contexts[0].sampling_params.seed == 7
    assert poet_contexts[0].max_length == 2048


async def test_the_default_temperature_is_from_the_model_and_default_seeds_differ() -> None:
    contexts: list[TextContext] = []

    def choose(context: TextContext) -> int:
        contexts.append(context)
        return FakeTokenizer.EOS

    async with run_in_process(FakePipeline(choose)) as server:
        await server.chat()
        await server.chat()
    params = [context.sampling_params for context in contexts]
    # From generation_config.json of the demo model.
    assert {sampling.temperature for sampling in params} == {0.5}
    assert params[0].seed != params[1].seed


@pytest.mark.parametrize(
    ("message", "rendered_text"),
    [
        (user_message("a"), "user: a"),
        (user_message([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), "user: a\nb"),
        ({"role": "system", "content": "a"}, "system: a"),
        ({"role": "developer", "content": "a", "name": None}, "system: a"),
        (
            {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, "audio": None},
            "assistant: a",
        ),
        ({"role": "assistant", "content": None, "refusal": "no"}, "assistant: no"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "assistant: no"),
        ({"role": "assistant", "content": "a", "annotations": []}, "assistant: a"),
        ({"role": "tool", "tool_call_id": "1", "content": "18"}, "tool: 18"),
        (
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
                ],
            },
            'assistant: <tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>',
        ),
    ],
)
async def test_messages_are_rendered_by_the_template(message: dict[str, Any], rendered_text: str) -> None:
    async with run_in_process() as server:
        response = await server.post("/v1/chat/completions/render", messages=[message])
        assert response.status_code == 200, response.text
        assert response.json()["prompt"] == f"{rendered_text}assistant: "
        assert response.json()["prompt_token_ids"] == list(f"{rendered_text}assistant: ".encode())
        assert server.pipeline.batches == []
        tokenized = await server.http.post("/tokenize", json={"messages": [message]})
        assert tokenized.json()["tokens"] == response.json()["prompt_token_ids"]


async def test_the_developer_role_is_kept_if_the_template_contains_its_name() -> None:
    template = "{% for m in messages %}{{ m.role }};{% endfor %}{# developer #}"
    async with run_in_process(template=template) as server:
        response = await server.post(
            "/v1/chat/completions/render", messages=[{"role": "developer", "content": "a"}]
        )
        assert response.json()["prompt"] == "developer;"


async def test_arguments_of_calls_are_text_if_the_template_concatenates_them() -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ 'x' + c.function.arguments }}{% endfor %}"
    template = f"{{% for m in messages %}}{calls}{{% endfor %}}."
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    async with run_in_process(template=template) as server:
        response = await server.post(
            "/v1/chat/completions/render",
            messages=[user_message("a"), {"role": "assistant", "tool_calls": [call]}],
        )
        assert response.json()["prompt"] == 'x{"a":1}.'


async def test_template_options_are_variables_of_the_template() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
        "{{ mood }}{{ reasoning_effort }}"
    )
    async with run_in_process(template=template) as server:
        for body, prompt in (
            ({}, "Hi>"),
            ({"add_generation_prompt": False}, "Hi"),
            ({"continue_final_message": True}, "Hi"),
            ({"chat_template_kwargs": {"mood": "glad"}}, "Hi>glad"),
            ({"reasoning_effort": "high"}, "Hi>high"),
        ):
            response = await server.post("/v1/chat/completions/render", messages=[user_message("Hi")], **body)
            assert response.json()["prompt"] == prompt, response.text


async def test_reasoning_effort_none_disables_thinking_and_unsupported_values_are_refused() -> None:
    template = "{{ enable_thinking | default('on') }}"
    async with run_in_process(template=template) as server:
        response = await server.post(
            "/v1/chat/completions/render", messages=[user_message("a")], reasoning_effort="none"
        )
        assert response.json()["prompt"] == "False"
        error = await server.expect_refusal(
            "/v1/chat/completions", messages=[user_message("a")], reasoning_effort="low"
        )
        assert error["param"] == "reasoning_effort"
    async with run_in_process(template=THINKING) as server:  # this template always enables reasoning
        error = await server.expect_refusal(
            "/v1/chat/completions", messages=[user_message("a")], reasoning_effort="none"
        )
        assert error["param"] == "reasoning_effort"


async def test_a_tool_call_has_the_openai_format_and_is_parsed_only_with_tools() -> None:
    async with run_in_process(FakePipeline.saying(f"Wait. {CALL}")) as server:
        answer = await server.chat(tools=[WEATHER, TIME])
        ChatCompletion.model_validate(answer)
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Wait."
        [call] = choice["message"]["tool_calls"]
        assert call.keys() == {"id", "type", "function"}
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
        truncated_response = await server.chat(tools=[WEATHER], max_tokens=70)
        assert truncated_response["choices"][0]["finish_reason"] == "length"
        for body in ({"tool_choice": "none", "tools": [WEATHER]}, {}):
            answer = await server.chat(**body)
            assert "tool_calls" not in answer["choices"][0]["message"]
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert answer["choices"][0]["message"]["content"] == f"Wait. {CALL}"


async def test_without_parallel_tool_calls_the_first_call_ends_the_output() -> None:
    async with run_in_process(FakePipeline.saying(CALL + CALL)) as server:
        parallel_calls = await server.chat(tools=[WEATHER])
        assert len(parallel_calls["choices"][0]["message"]["tool_calls"]) == 2
        single_call = await server.chat(tools=[WEATHER], parallel_tool_calls=False, return_token_ids=True)
        assert len(single_call["choices"][0]["message"]["tool_calls"]) == 1
        assert single_call["choices"][0]["finish_reason"] == "tool_calls"
        assert (
            single_call["usage"]["completion_tokens"]
            == len(single_call["choices"][0]["token_ids"])
            <= len(CALL)
        )
        await wait_until(lambda: server.services.worker.num_outstanding == 0)


async def test_only_tools_that_the_model_may_call_are_rendered_into_the_prompt() -> None:
    async with run_in_process(template=HERMES) as server:
        allowed_tools = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
        for body, names in (
            ({}, ["get_weather", "get_time"]),
            ({"tool_choice": "auto"}, ["get_weather", "get_time"]),
            ({"tool_choice": "none"}, []),
            ({"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed_tools}}, ["get_time"]),
        ):
            response = await server.post(
                "/v1/chat/completions/render", messages=[user_message("a")], tools=[WEATHER, TIME], **body
            )
            prompt = response.json()["prompt"]
            assert [name for name in ("get_weather", "get_time") if name in prompt] == names
            assert ("description" in prompt) == ("get_weather" in names)


async def test_a_required_choice_among_no_tools_is_refused() -> None:
    async with run_in_process() as server:
        for tool_choice, tools in (
            ("required", []),
            ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, [WEATHER]),
        ):
            error = await server.expect_refusal(
                "/v1/chat/completions", messages=[user_message("Hi")], tools=tools, tool_choice=tool_choice
            )
            assert error["param"] == "tool_choice"
            assert "no tools" in error["message"]


async def test_tools_that_the_template_omits_are_refused() -> None:
    async with run_in_process(template=FakeTokenizer.TEMPLATE) as server:
        error = await server.expect_refusal(
            "/v1/chat/completions", messages=[user_message("Hi")], tools=[WEATHER]
        )
        assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
        assert await server.chat(tools=[WEATHER], tool_choice="none")


async def test_reasoning_is_separate_from_the_content() -> None:
    async with run_in_process(
        FakePipeline.saying("<think>\nWhy?\n</think>\n\nSo."), template=THINKING
    ) as server:
        answer = await server.chat()
        [choice] = answer["choices"]
        assert choice["message"]["reasoning_content"].strip() == "Why?"
        assert choice["message"]["content"] == "So."
        details = answer["usage"]["completion_tokens_details"]
        assert (
            len("<think>\nWhy?\n</think>")
            <= details["reasoning_tokens"]
            <= len("<think>\nWhy?\n</think>\n\n")
        )
        echoed_message = {**choice["message"], "annotations": []}
        response = await server.post(
            "/v1/chat/completions", messages=[user_message("Hi"), echoed_message, user_message("And?")]
        )
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("field", "names"),
    [("both", ["reasoning", "reasoning_content"]), ("reasoning", ["reasoning"])],
)
async def test_the_setting_reasoning_field_selects_the_field_names(field: str, names: list[str]) -> None:
    pipeline = FakePipeline.saying("<think>Why?</think>So.")
    async with run_in_process(pipeline, template=THINKING, reasoning_field=field) as server:
        message = (await server.chat())["choices"][0]["message"]
        assert sorted(name for name in message if name.startswith("reasoning")) == names
        response = await server.post("/v1/chat/completions", messages=[user_message("Hi")], stream=True)
        deltas = [chunk["choices"][0]["delta"] for chunk in parse_events(response.text)[:-1]]
        for name in names:
            assert "".join(delta.get(name, "") for delta in deltas) == "Why?"
        assert all(name in names for delta in deltas for name in delta if name.startswith("reasoning"))


@pytest.mark.parametrize("unknown_fields", ["error", "warn"])
async def test_unknown_template_options_have_no_effect_and_the_option_messages_is_refused(
    unknown_fields: str,
) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ enable_thinking }}"
    options = {"enable_thinking": False, "provider": {"order": ["a"]}, "x-y": None, "": 1}
    async with run_in_process(template=template, unknown_fields=unknown_fields) as server:
        body = {"messages": [user_message("Hi")], "chat_template_kwargs": options}
        assert (await server.post("/v1/chat/completions/render", **body)).json()["prompt"] == "HiFalse"
        assert (await server.post("/tokenize", **body)).json()["tokens"] == list(b"HiFalse")
        assert (await server.chat(**body))["choices"][0]["message"]["content"] == "Hello!"
        options["messages"] = []  # an option named messages would replace the conversation
        assert "messages" in (await server.expect_refusal("/v1/chat/completions", **body))["message"]


def generate_a_special_token(context: TextContext) -> int:
    return [*b"a", FakeTokenizer.EOS, *b"b"][len(context.generated_tokens)]


@pytest.mark.parametrize(("skip_special_tokens", "text"), [(None, "ab"), (True, "ab"), (False, "a<|end|>b")])
async def test_special_tokens_are_in_the_text_only_if_skip_special_tokens_is_false(
    skip_special_tokens: bool | None, text: str
) -> None:
    fields = {"skip_special_tokens": skip_special_tokens, "ignore_eos": True, "max_tokens": 3}
    for template in (HERMES, FakeTokenizer.TEMPLATE):
        async with run_in_process(FakePipeline(generate_a_special_token), template=template) as server:
            assert (await server.chat(**fields))["choices"][0]["message"]["content"] == text
            tools = [WEATHER] if template == HERMES else None
            assert (await server.chat(**fields, tools=tools))["choices"][0]["message"]["content"] == text
            [choice] = (await server.complete(**fields, logprobs=0))["choices"]
            assert choice["text"] == text
            assert choice["logprobs"]["text_offset"] == [0, 1, len(text) - 1]


async def test_reasoning_of_messages_is_renamed_for_the_template() -> None:
    template = "{% for m in messages %}{{ m.thinking }}{% endfor %}"
    async with run_in_process(template=template) as server:
        message = {"role": "assistant", "content": "So.", "reasoning_content": "Why?"}
        response = await server.post("/v1/chat/completions/render", messages=[message])
        assert response.json()["prompt"] == "Why?"


async def test_response_formats_and_forced_or_strict_calls_become_grammars_of_the_context() -> None:
    contexts: list[TextContext] = []

    def choose(context: TextContext) -> int:
        contexts.append(context)
        return FakeTokenizer.EOS

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    bodies_and_kinds: list[tuple[dict[str, Any], str]] = [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
            "json_schema",
        ),
        ({"structured_outputs": {"json": schema}}, "json_schema"),
        ({"structured_outputs": {"json": json.dumps(schema)}}, "json_schema"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "structural_tag"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
            "structural_tag",
        ),
        (
            {"tools": [TIME, {**WEATHER, "function": {**WEATHER["function"], "strict": True}}]},
            "structural_tag",
        ),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "structural_tag"),
        (
            {"tools": [WEATHER], "tool_choice": "none", "response_format": {"type": "json_object"}},
            "json_object",
        ),
    ]
    async with run_in_process(FakePipeline(choose), grammars_enabled=True) as server:
        for body, kind in bodies_and_kinds:
            await server.chat(**body)
            grammar = contexts[-1].grammar
            assert grammar is not None
            assert grammar.kind == kind, body
        await server.chat(response_format={"type": "text"})
        assert contexts[-1].grammar is None
        await server.complete(structured_outputs={"regex": "a"})
        assert contexts[-1].grammar is not None


async def test_conflicting_and_unsupported_formats_are_refused() -> None:
    async with run_in_process(grammars_enabled=True) as server:
        chat = {"messages": [user_message("Hi")]}
        formats = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
        assert (await server.expect_refusal("/v1/chat/completions", **chat, **formats))[
            "param"
        ] == "structured_outputs"
        schema = {"type": "array", "uniqueItems": True}
        function = {
            "name": "f",
            "strict": True,
            "parameters": {"type": "object", "properties": {"a": schema}},
        }
        for body in ({}, {"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
            tools = [WEATHER, {"type": "function", "function": function}]
            error = await server.expect_refusal("/v1/chat/completions", **chat, tools=tools, **body)
            assert (error["param"], error["code"]) == ("tools[1].function.parameters", "unsupported_schema")
            assert "uniqueItems" in error["message"]
        assert await server.chat(tools=tools, tool_choice="none")
        tool_choice = {"type": "function", "function": {"name": "get_weather"}}
        assert await server.chat(tools=tools, tool_choice=tool_choice)  # does not use the schema of `f`
        long_choice = {"structured_outputs": {"choice": ["a" * 2**20]}}
        assert (
            "1048576"
            in (await server.expect_refusal("/v1/chat/completions", **chat, **long_choice))["message"]
        )
        outputs = {"json": {"type": "object", "unevaluatedProperties": False, "not": {}}}
        error = await server.expect_refusal("/v1/chat/completions", **chat, structured_outputs=outputs)
        assert (error["param"], error["code"]) == ("structured_outputs.json", "unsupported_schema")


async def test_unknown_models_get_status_404_and_adapters_are_listed_as_models() -> None:
    async with run_in_process(adapters=("poet",)) as server:
        for path, body in (
            ("chat/completions", {"messages": [user_message("Hi")]}),
            ("completions", {"prompt": "Hi"}),
        ):
            response = await server.post(f"/v1/{path}", model="gpt-4", **body)
            assert response.status_code == 404
            error = response.json()["error"]
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert "demo, poet" in error["message"]
        models = (await server.http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["parent"]) for model in models] == [("demo", None), ("poet", "demo")]
        assert (await server.http.get("/v1/models/poet")).json() == models[1]
        assert (await server.http.get("/v1/models/a/b")).status_code == 404


async def test_a_model_without_a_template_refuses_chats() -> None:
    async with run_in_process(template=None) as server:
        error = await server.expect_refusal("/v1/chat/completions", messages=[user_message("Hi")])
        assert "no chat template" in error["message"]
        assert (await server.complete())["choices"][0]["text"] == "Hello!"
