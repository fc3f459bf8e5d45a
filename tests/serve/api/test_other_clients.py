"""Fields, roles and routes that clients of other inference servers use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.in_process_server import THINKING, InProcessServer, parse_events, run_in_process, user_message

from penstock.pipelines.core import SamplingParams, TextContext, TokenGeneratorRequest
from penstock.scheduler import Scheduler
from penstock.serve.api.request_context import build_context
from penstock.testing import FakePipeline, FakeTokenizer
from penstock.text.tokenizer import TextTokenizer
from penstock.worker.messages import WorkerInfo
from penstock.worker.process import WorkerRuntime

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RENDER = "/v1/chat/completions/render"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": [user_message("Hi")]}, COMPLETIONS: {"prompt": "Hi"}}
TEMPLATE_WITH_IPYTHON = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant', 'ipython'] %}"
    "{{ raise_exception('roles are user, assistant and ipython') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
TEMPLATE_WITHOUT_IPYTHON = (
    "{% for m in messages %}{% if m.role in ['user', 'note'] %}{{ m.content }};{% endif %}{% endfor %}"
)


def make_recording_pipeline(contexts: list[TextContext], text: str = "Hello!") -> FakePipeline:
    """Return a pipeline that generates `text` and appends the context of each request to `contexts`."""
    answer = [*text.encode(), FakeTokenizer.EOS]

    def choose(context: TextContext) -> int:
        if not len(context.generated_tokens):
            contexts.append(context)
        return answer[min(len(context.generated_tokens), len(answer) - 1)]

    return FakePipeline(choose)


async def post_ok(server: InProcessServer, path: str, **body: Any) -> dict[str, Any]:
    response = await server.http.post(path, json={**BODIES[path], **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_default_model_is_the_served_model(path: str) -> None:
    async with run_in_process() as server:
        name = server.services.model_name
        for fields in ({}, {"model": None}, {"model": name}):
            assert (await post_ok(server, path, **fields))["model"] == name
            response = await server.http.post(path, json={**BODIES[path], **fields, "stream": True})
            assert {chunk["model"] for chunk in parse_events(response.text)[:-1]} == {name}
        assert (await server.http.post(path, json={**BODIES[path], "model": ""})).status_code == 404
        assert (await server.http.post(path, json=[])).status_code == 400


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"guided_json": {"type": "integer"}}, "json_schema", '{"type": "integer"}'),
        ({"guided_json": '{"type": "integer"}'}, "json_schema", '{"type": "integer"}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "é"]}, "choice", '["a", "é"]'),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_guided_fields_become_grammars_of_the_context(
    path: str, fields: dict[str, Any], kind: str, text: str
) -> None:
    contexts: list[TextContext] = []
    async with run_in_process(make_runtime=runtime_factory_with_grammars(contexts)) as server:
        await post_ok(server, path, **fields)
        grammar = contexts[0].grammar
        assert grammar is not None
        assert (grammar.kind, grammar.text) == (kind, text)


def runtime_factory_with_grammars(contexts: list[TextContext]) -> Any:
    """Return a function that creates a worker runtime with grammars enabled.

    The pipeline of the runtime appends the context of each request to `contexts`.
    """
    info = WorkerInfo(
        max_length=2048,
        max_batch_size=8,
        max_batch_input_tokens=8192,
        num_blocks=1000,
        block_size=32,
        vocab_size=257,
        grammars_enabled=True,
    )
    return lambda: WorkerRuntime(
        scheduler=Scheduler(make_recording_pipeline(contexts), max_batch_size=8), info=info
    )


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_repeat_penalty_and_bad_words_are_set_on_the_context(path: str) -> None:
    contexts: list[TextContext] = []
    async with run_in_process(make_recording_pipeline(contexts)) as server:
        await post_ok(server, path, repeat_penalty=1.25, bad_words=["no", "x"])
        await post_ok(server, path, repeat_penalty=1.5, repetition_penalty=1.5)
        params = [context.sampling_params for context in contexts]
        assert [sampling.repetition_penalty for sampling in params] == [1.25, 1.5]
        assert params[0].banned_sequences == [[*b"no"], [*b" no"], [*b"x"], [*b" x"]]
        assert params[1].banned_sequences is None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_string_is_in_the_output_on_request(path: str, stream: bool) -> None:
    async with run_in_process(FakePipeline.saying("Hello there!")) as server:
        for include_stop, text in ((None, "Hel"), (False, "Hel"), (True, "Hello t")):
            body = {**BODIES[path], "stop": ["lo t", "zzz"], "include_stop_str_in_output": include_stop}
            response = await server.post(path, **body, stream=stream)
            chunks = parse_events(response.text)[:-1] if stream else [response.json()]
            choices = [chunk["choices"][0] for chunk in chunks]
            streamed_text = "".join(
                choice.get("text") or choice.get("message", choice.get("delta", {})).get("content") or ""
                for choice in choices
            )
            assert streamed_text == text
            assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("limit", "max_tokens", "expected"),
    [(3, 4, "fgh"), (8, 4, "abcdefgh"), (900, 4, "abcdefgh"), (-1, 2044, "efgh"), (-1, None, "abcdefgh")],
)
async def test_prompts_are_truncated_on_request(limit: int, max_tokens: int | None, expected: str) -> None:
    contexts: list[TextContext] = []
    async with run_in_process(
        make_recording_pipeline(contexts), template="{{ messages[0].content }}"
    ) as server:
        server.services.tokenizer.max_length = 2048
        body = {"truncate_prompt_tokens": limit, "max_tokens": max_tokens}
        for prompt in ("abcdefgh", [*b"abcdefgh"]):
            answer = await post_ok(server, COMPLETIONS, **body, prompt=prompt, echo=True)
            assert answer["choices"][0]["text"].startswith(expected)
            assert answer["usage"]["prompt_tokens"] == len(expected)
        await post_ok(server, CHAT, **body, messages=[user_message("abcdefgh")])
        assert [bytes(context.prompt_tokens.tolist()).decode() for context in contexts] == [expected] * 3
        rendered_response = (await server.post(RENDER, **body, messages=[user_message("abcdefgh")])).json()
        assert (rendered_response["prompt"], rendered_response["count"]) == (expected, len(expected))


def test_a_truncation_limit_of_minus_1_keeps_all_tokens_without_a_maximum_length() -> None:
    tokenizer = FakeTokenizer(max_length=None)
    params = SamplingParams(max_new_tokens=3)
    request = TokenGeneratorRequest("1", 0, "m", prompt="abcdef", sampling_params=params)
    assert len(build_context(tokenizer, request, -1).prompt_tokens) == 6


async def test_truncation_keeps_the_bos_token_except_for_a_limit_of_1(shared_data: Path) -> None:
    tokenizer = TextTokenizer(shared_data / "models/stories260K")
    request = TokenGeneratorRequest("1", 0, "m", prompt="Once upon a time there was")
    full_prompt = tokenizer.build_context(request).prompt_tokens.tolist()
    assert tokenizer.special_tokens["bos_token"] == "<s>"
    for limit, expected in (
        (1, full_prompt[-1:]),
        (4, [full_prompt[0], *full_prompt[-3:]]),
        (len(full_prompt), full_prompt),
    ):
        truncated_context = build_context(tokenizer, request, limit)
        assert truncated_context.prompt_tokens.tolist() == expected
    assert build_context(tokenizer, request, 100).prompt == request.prompt


async def test_truncation_to_the_maximum_length_leaves_room_for_max_tokens() -> None:
    async with run_in_process() as server:
        server.services.tokenizer.max_length = 2048
        await server.expect_refusal(COMPLETIONS, prompt="x" * 5000)
        answer = await post_ok(
            server, COMPLETIONS, prompt="x" * 5000, truncate_prompt_tokens=-1, max_tokens=8
        )
        assert answer["usage"]["prompt_tokens"] == 2040


async def test_prompt_log_probabilities_are_returned_without_streaming() -> None:
    async with run_in_process(FakePipeline.saying("Hello!")) as server:
        for fields in ({}, {"n": 2}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2, "n": 2}):
            answer = await post_ok(server, CHAT, prompt_logprobs=1, **fields)
            text = "user: Hiassistant: "
            check_prompt_logprobs(answer["prompt_logprobs"], text)
            for choice in answer["choices"]:
                assert (choice["logprobs"] is not None) == ("logprobs" in fields)
        for fields in (
            {},
            {"n": 2},
            {"logprobs": 1},
            {"logprobs": 2, "echo": True, "n": 2},
            {"max_tokens": 0},
        ):
            answer = await post_ok(server, COMPLETIONS, prompt=["ab", "cdé"], prompt_logprobs=0, **fields)
            for index, choice in enumerate(answer["choices"]):
                check_prompt_logprobs(choice["prompt_logprobs"], ["ab", "cdé"][index // fields.get("n", 1)])
                assert (choice["logprobs"] is not None) == ("logprobs" in fields)
        assert "prompt_logprobs" not in await post_ok(server, CHAT)
        for path, body in BODIES.items():
            error = await server.expect_refusal(path, **body, prompt_logprobs=1, stream=True)
            assert error["param"] == "prompt_logprobs"


def check_prompt_logprobs(rows: list[Any], text: str) -> None:
    first_row, *other_rows = rows
    assert first_row is None
    ids = list(text.encode())
    for token_id, row in zip(ids[1:], other_rows, strict=True):
        expected_entry = {
            "logprob": 0.0,
            "rank": 1,
            "decoded_token": bytes([token_id]).decode(errors="replace"),
        }
        assert row == {str(token_id): expected_entry}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (
            CHAT,
            {"messages": [user_message("x" * 600)], "prompt_logprobs": 1, "max_tokens": 1},
            "prompt_logprobs",
        ),
        (COMPLETIONS, {"prompt": "x" * 600, "prompt_logprobs": 1}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "x" * 200, "prompt_logprobs": 1, "n": 3}, "prompt_logprobs"),
    ],
)
async def test_the_number_of_prompt_log_probabilities_is_limited(
    path: str, fields: dict[str, Any], param: str
) -> None:
    async with run_in_process(max_logprobs_per_request=1000) as server:
        error = await server.expect_refusal(path, **fields)
        assert error["param"] == param
        assert "of the prompt" in error["message"]
        assert server.pipeline.batches == []


async def test_tokens_are_returned_as_token_ids_on_request() -> None:
    async with run_in_process(FakePipeline.saying("né")) as server:
        for stream in (False, True):
            body = {"return_tokens_as_token_ids": True, "stream": stream}
            response = await server.post(CHAT, **BODIES[CHAT], **body, logprobs=True, top_logprobs=1)
            chunks = parse_events(response.text)[:-1] if stream else [response.json()]
            entries = [
                entry
                for chunk in chunks
                for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
            ]
            assert [entry["token"] for entry in entries] == [f"token_id:{byte}" for byte in "né".encode()]
            assert [entry["bytes"] for entry in entries] == [[byte] for byte in "né".encode()]
            assert entries[0]["top_logprobs"][0]["token"] == "token_id:110"
            response = await server.post(COMPLETIONS, **BODIES[COMPLETIONS], **body, logprobs=1)
            chunks = parse_events(response.text)[:-1] if stream else [response.json()]
            rows = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
            tokens = [token for row in rows for token in row["tokens"]]
            assert tokens == [f"token_id:{byte}" for byte in "né".encode()]
            assert [*rows[0]["top_logprobs"][0]] == ["token_id:110"]
        plain_response = await post_ok(server, CHAT, logprobs=True)  # without the field, a token is text
        assert plain_response["choices"][0]["logprobs"]["content"][0]["token"] == "n"


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_omitted_on_request(stream: bool) -> None:
    pipeline = FakePipeline.saying("<think>\nWhy?\n</think>\n\nHello")
    async with run_in_process(pipeline, template=THINKING) as server:
        for include_reasoning in (None, True, False):
            body = {**BODIES[CHAT], "include_reasoning": include_reasoning, "stream": stream}
            response = await server.post(CHAT, **body)
            chunks = parse_events(response.text)[:-1] if stream else [response.json()]
            messages = [chunk["choices"][0].get("delta" if stream else "message", {}) for chunk in chunks]
            assert "".join(message.get("content") or "" for message in messages) == "Hello"
            reasoning_text = "".join(message.get("reasoning") or "" for message in messages)
            assert reasoning_text == ("" if include_reasoning is False else "Why?")
            assert any("reasoning_content" in message for message in messages) == (
                include_reasoning is not False
            )


@pytest.mark.parametrize("path", [CHAT, RENDER, "/tokenize"])
async def test_only_roles_in_the_template_are_accepted(path: str) -> None:
    messages = [user_message("a"), {"role": "ipython", "content": "18"}, {"role": "note", "content": "b"}]
    async with run_in_process(template=TEMPLATE_WITH_IPYTHON) as server:
        response = await server.http.post(RENDER, json={"messages": messages[:2]})
        assert response.json()["prompt"] == "<user>a<ipython>18"
        error = await server.expect_refusal(path, messages=messages)
        assert error["param"] == "messages"
        assert "roles are user, assistant and ipython" in error["message"]
    async with run_in_process(template=TEMPLATE_WITHOUT_IPYTHON) as server:
        response = await server.http.post(RENDER, json={"messages": [messages[0], messages[2]]})
        assert response.json()["prompt"] == "a;b;"
        error = await server.expect_refusal(path, messages=messages)
        assert error["param"] == "messages[1].role"
        assert "ipython" in error["message"]


async def test_text_parts_of_any_role_are_joined() -> None:
    text_parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = (
        "{% for m in messages %}[{{ m.role + m.content }}]{% endfor %}"  # the template accepts only strings
    )
    async with run_in_process(template=template) as server:
        messages = [
            user_message(text_parts),
            {"role": "my role", "content": text_parts},
            {"role": "note", "content": "x"},
        ]
        body = {"messages": messages, "continue_final_message": True}
        response = await server.http.post(RENDER, json=body)
        assert response.json()["prompt"] == "[usera\nb][my rolea\nb][notex"


@pytest.mark.parametrize("content", [{"content": None}, {"content": []}, {"content": ""}, {}])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "ipython"])
async def test_missing_content_is_empty_text(role: str, content: dict[str, Any]) -> None:
    template = "{% for m in messages %}[{{ m.role + m.content }}]{% endfor %}"
    message = {"role": role, **content, **({"tool_call_id": "1"} if role == "tool" else {})}
    async with run_in_process(template=template) as server:
        response = await server.http.post(RENDER, json={"messages": [message, user_message("a")]})
        assert response.json()["prompt"] == f"[{role}][usera]", response.text


async def test_an_empty_output_has_empty_text() -> None:
    async with run_in_process(FakePipeline.saying("")) as server:
        assert (await post_ok(server, CHAT))["choices"][0]["message"]["content"] == ""
        assert (await post_ok(server, COMPLETIONS))["choices"][0]["text"] == ""


async def test_ping_and_load_return_the_status_and_the_load_without_a_key() -> None:
    async with run_in_process(api_key=("secret",)) as server:
        for method in ("GET", "POST"):
            response = await server.http.request(method, "/ping")
            assert (response.status_code, response.json()) == (200, {"status": "ok"})
        assert (await server.http.get("/load")).json() == {"server_load": 0}
        with server.services.gate.track():
            assert (await server.http.get("/load")).json() == {"server_load": 1}


async def test_common_values_of_fields_of_other_servers_are_accepted() -> None:
    fields: dict[str, Any] = {
        "cache_prompt": True,
        "store": False,
        "seed": 1,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "typical_p": 1.0,
        "xtc_probability": 0.0,
        "repeat_last_n": -1,
        "transforms": [],
        "truncation_side": "left",
    }
    async with run_in_process() as server:
        for path in (CHAT, COMPLETIONS):
            assert (await post_ok(server, path, **fields))["choices"]
        for level in ("low", "medium", "high"):
            assert (await post_ok(server, CHAT, verbosity=level, prompt_cache_retention="24h"))["choices"]
