"""Random, malformed and very large bodies get a result or a client error. OpenAPI describes the routes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.in_process_server import THINKING, InProcessServer, parse_events, run_in_process, user_message
from support.random_draws import num_examples

from penstock.serve.api.parameters import UNSUPPORTED
from penstock.serve.api.schemas import ChatBody, CompletionBody, TokenizeBody

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["auto", "none", "text", "user", "function", "a", "demo", "", "{", "0", "97", "\x00"]),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "text", "function", "name", "arguments", "json", "97", "x"]
            ),
            children,
            max_size=4,
        )
    ),
    max_leaves=8,
)
content_parts = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "refusal", "image_url"]) | json_values},
        optional={"text": json_values, "refusal": json_values},
    ),
    max_size=3,
)
calls = st.lists(
    st.fixed_dictionaries(
        {
            "function": st.fixed_dictionaries(
                {"name": st.text(max_size=4)}, optional={"arguments": json_values}
            )
        },
        optional={"id": json_values, "type": json_values, "index": json_values},
    ),
    max_size=2,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "developer", "assistant", "tool"]) | json_values},
        optional={
            "content": st.text(max_size=5) | content_parts | json_values,
            "tool_calls": calls | json_values,
            "tool_call_id": st.text(max_size=3) | json_values,
            "refusal": json_values,
            "reasoning": json_values,
            "name": json_values,
        },
    ),
    min_size=1,
    max_size=3,
)
tools = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": st.sampled_from(["f", "g", "f.g"]) | json_values},
                optional={"parameters": json_values, "description": json_values, "strict": json_values},
            ),
        }
    ),
    max_size=2,
)
formats = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "json_object", "json_schema", "structural_tag"]) | json_values},
    optional={"json_schema": json_values, "format": json_values},
)
FIELD_STRATEGIES: dict[str, st.SearchStrategy[Any]] = {
    "messages": messages,
    "tools": tools,
    "response_format": formats,
    "prompt": st.text(max_size=5) | st.lists(st.integers(0, 300), max_size=3),
    "temperature": st.floats(0, 2),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "n": st.integers(0, 4),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "logit_bias": st.dictionaries(st.sampled_from(["97", "1", "300", "x"]), st.floats(-100, 100), max_size=2),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans() | json_values}),
    "chat_template_kwargs": st.dictionaries(st.text(max_size=5), json_values, max_size=2),
    "structured_outputs": st.dictionaries(
        st.sampled_from(["json", "regex", "choice", "grammar", "structural_tag"]), json_values, max_size=2
    ),
}


def body_strategy(body_class: Any, required_field: str) -> st.SearchStrategy[dict[str, Any]]:
    names = [*body_class.model_fields, *UNSUPPORTED.get(body_class, {}), "unheard_of"]
    fields = {name: FIELD_STRATEGIES.get(name, json_values) | json_values for name in names}
    required_fields = {
        required_field: FIELD_STRATEGIES[required_field],
        "model": st.just("demo") | st.just("demo") | json_values,
    }
    optional_fields = {name: strategy for name, strategy in fields.items() if name not in required_fields}
    optional_names = st.lists(st.sampled_from(sorted(optional_fields)), max_size=4, unique=True)
    return optional_names.flatmap(
        lambda names: st.fixed_dictionaries(
            {**required_fields, **{name: optional_fields[name] for name in names}}
        )
    )


async def check_response(server: InProcessServer, path: str, body: Any) -> int:
    response = await server.http.post(path, json=body)
    status = response.status_code
    assert status in (200, 400, 404), (body, response.text)
    if status != 200:
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["message"]
    elif isinstance(body, dict) and body.get("stream"):
        assert parse_events(response.text)[-1] == "[DONE]"
    else:
        assert isinstance(response.json(), dict)
    return status


@settings(max_examples=num_examples(10))
@given(data=st.data(), grammars_enabled=st.booleans())
@pytest.mark.parametrize(
    ("path", "body_class", "required_field"),
    [
        ("/v1/chat/completions", ChatBody, "messages"),
        ("/v1/completions", CompletionBody, "prompt"),
        ("/tokenize", TokenizeBody, "messages"),
    ],
)
def test_no_random_body_causes_a_server_error(
    path: str, body_class: Any, required_field: str, data: st.DataObject, grammars_enabled: bool
) -> None:
    bodies = data.draw(st.lists(body_strategy(body_class, required_field), min_size=8, max_size=8))

    async def run() -> None:
        async with run_in_process(template=THINKING, grammars_enabled=grammars_enabled) as server:
            for body in bodies:
                await check_response(server, path, body)
                if path == "/v1/chat/completions":
                    await check_response(server, f"{path}/render", body)
            assert server.services.worker.num_outstanding == 0
            assert (await server.complete())["choices"][0]["text"] == "Hello!"

    asyncio.run(run())


RAW_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"x"',
    b"5",
    b"\xff\xfe",
    b"{}",
    b'{"model": "demo"',
    b'{"model": "demo", "messages": [], "messages": []}',
    b'{"model": NaN}',
    b'{"model": "\\ud800"}',
    b'{"model": "demo", "prompt": "\\ud800"}',
    b'{"model":' * 1000,
    b"[" * 100_000,
    b'{"temperature": 1e999}',
    b'{"seed": ' + b"9" * 5000 + b"}",
    json.dumps({"model": "x" * 100_000, "messages": [user_message("a")], "prompt": "a"}).encode(),
    json.dumps({"model": "demo", "x" * 100_000: 1, "messages": [user_message("a")], "prompt": "a"}).encode(),
    json.dumps({"model": "demo", "messages": [5] * 100_000, "prompt": [1] * 50_000 + ["x"]}).encode(),
    json.dumps({"model": "demo", "messages": [user_message("a")] * 2000, "prompt": [[1]] * 5000}).encode(),
    json.dumps(
        {"model": "demo", "messages": [user_message("a")], "prompt": "a", "stop": ["x"] * 100_000}
    ).encode(),
]


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/completions", "/v1/chat/completions/render", "/tokenize", "/detokenize"],
)
async def test_malformed_and_large_bodies_plain_text_and_get_requests_are_refused(path: str) -> None:
    async with run_in_process() as server:
        for raw_body in RAW_BODIES:
            response = await server.http.post(
                path, content=raw_body, headers={"content-type": "application/json"}
            )
            assert response.status_code in (400, 404), (raw_body[:50], response.text)
            assert response.json()["error"]["type"] == "invalid_request_error"
            assert len(response.text) < 2000
        text_response = await server.http.post(path, content=b"{}", headers={"content-type": "text/plain"})
        assert text_response.status_code == 415
        assert (await server.http.get(path)).status_code == 405


async def test_the_openapi_document_describes_the_routes() -> None:
    async with run_in_process() as server:
        document = (await server.http.get("/openapi.json")).json()
        for path, field in (("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")):
            operation = document["paths"][path]["post"]
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            assert field in schema["required"]
            assert {"store", "service_tier", "temperature"} <= schema["properties"].keys()
            assert schema["additionalProperties"] is False
            assert "$ref" not in json.dumps(schema)
            assert {"200", "400", "429", "503"} <= operation["responses"].keys()
