"""No malformed or unusual request causes a server error, a late response or a restart of the worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest
from support.server_process import ServerProcess, post_head, raw_exchange

from penstock.serve.api.parameters import UNSUPPORTED
from penstock.serve.api.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

TIME_LIMIT = 30
"""Time limit of each request in seconds, on a busy machine."""

MESSAGES = [{"role": "user", "content": "Hi"}]
ROUTES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"model": "demo", "messages": MESSAGES, "max_tokens": 2}),
    "/v1/completions": (CompletionBody, {"model": "demo", "prompt": "Hi", "max_tokens": 2}),
    "/v1/chat/completions/render": (ChatBody, {"model": "demo", "messages": MESSAGES}),
    "/tokenize": (TokenizeBody, {"model": "demo", "prompt": "Hi"}),
    "/detokenize": (DetokenizeBody, {"model": "demo", "tokens": [5]}),
}
CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"

UNUSUAL_VALUES: list[Any] = [
    True, 0, -1, 1, 1.5, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, -1e308, 5e-324,
    "", "a", "\x00", "0", "null", "\ud83d\ude00" * 50, "x" * 10_000,
    [], [[]], [None], [0], [-1], ["a"], ["a", 1], [{}], [[[[1]]]], [2**64], ["\x00"],
    {}, {"": {}}, {"type": None}, {"type": "x"}, {"a": {"a": {"a": {}}}}, {"content": "Hi"},
]  # fmt: skip
"""Values of every JSON type except null. A request with a value that its field accepts gets status 200."""


def nest(depth: int, opening: str = "[", closing: str = "]") -> str:
    return opening * depth + closing * depth


def make_tools(*parameters: Any, name: Any = "f") -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": schema}} for schema in parameters]


def make_schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


HOSTILE_SCHEMAS: list[Any] = [
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"$ref": "http://127.0.0.1:1/schema"},
    {"$ref": "file:///etc/passwd"},
    {"type": "string", "pattern": "(a+)+$"},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "a{1,100000}"},
    {"type": "string", "minLength": 10**9},
    {"type": "array", "minItems": 10**9},
    {"type": "integer", "multipleOf": 0},
    {"type": "integer", "minimum": 5, "maximum": 1},
    {"enum": []},
    {"enum": [str(number) for number in range(20_000)]},
    {"type": "wish"},
    {"type": ["object", 5]},
    {"properties": []},
    {"properties": {"a": 5}},
    {"required": "a"},
    {"anyOf": []},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"not": {}},
    False,
    5,
    "schema",
    {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(100)}},
    json.loads(nest(25, '{"items":', "}").replace(":}", ":{}}")),
]
LARGE_SCHEMA = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(2000)}}


def make_chat(**fields: Any) -> tuple[str, Any]:
    return CHAT_PATH, ROUTES[CHAT_PATH][1] | fields


def make_completion(**fields: Any) -> tuple[str, Any]:
    return COMPLETION_PATH, ROUTES[COMPLETION_PATH][1] | fields


def make_chat_and_completion(**fields: Any) -> list[tuple[str, Any]]:
    return [make_chat(**fields), make_completion(**fields)]


REFUSED_REQUESTS: list[tuple[str, Any]] = [
    (CHAT_PATH, {"model": "demo"}),
    make_chat(messages=[]),
    make_chat(model="other"),
    make_chat(messages="Hi"),
    make_chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    make_chat(messages=[{"role": "user", "content": "x" * 200_000}]),
    make_chat(messages=MESSAGES * 5000),
    *make_chat_and_completion(n=10**6),
    *make_chat_and_completion(n=0),
    *make_chat_and_completion(max_tokens=-5),
    *make_chat_and_completion(temperature=1e300),
    *make_chat_and_completion(top_p=-0.1),
    *make_chat_and_completion(stop=["x"] * 10**6),
    *make_chat_and_completion(stop="x" * 10**6),
    *make_chat_and_completion(stop_token_ids=[10**12]),
    *make_chat_and_completion(logit_bias={"-1": 5}),
    *make_chat_and_completion(logit_bias={str(number): 1 for number in range(10**5)}),
    *make_chat_and_completion(logit_bias={"5": 10**30}),
    *((path, body | {"x" * 10**6: 1}) for path, (_, body) in ROUTES.items()),
    *((path, {str(number): 1 for number in range(10**5)}) for path in ROUTES),
    make_chat(top_logprobs=10**9, logprobs=True),
    make_chat(tool_choice="required"),
    make_chat(tools=make_tools({}, name="")),
    make_chat(tools=make_tools({}, name="a b\n")),
    make_chat(tools=make_tools({}, name="f" * 10**6)),
    make_chat(tools=make_tools({}) * 2000),
    make_chat(response_format={"type": "json_schema"}),
    make_chat(chat_template_kwargs={"messages": []}),
    make_chat(chat_template="{% for i in range(10**9) %}x{% endfor %}"),
    make_completion(prompt=[5] * 10**6),
    make_completion(prompt=[[5]] * 10**5),
    make_completion(prompt=["a"] * 10**5),
    make_completion(prompt=[10**9]),
    make_completion(prompt=[-1]),
    make_completion(prompt=[5, "a"]),
    make_completion(prompt=[5.0, 6.5]),
    make_completion(prompt="x" * 300_000),
    make_completion(suffix="!"),
    make_completion(logprobs=10**6),
    ("/detokenize", {"model": "demo", "tokens": [2**64]}),
    ("/detokenize", {"model": "demo", "tokens": [-1]}),
    ("/tokenize", {"model": "demo", "prompt": "a", "messages": MESSAGES}),
]
"""Requests with an invalid, missing, unknown or too long field. All of them must be refused."""

UNUSUAL_REQUESTS: list[tuple[str, Any]] = [
    (CHAT_PATH, {"messages": MESSAGES}),
    make_chat(messages=[{"role": "user"}]),
    make_chat(messages=[{"role": "emperor", "content": "Hi"}]),
    *(make_chat(tools=make_tools(schema)) for schema in HOSTILE_SCHEMAS),
    *(make_chat(tools=make_tools(schema), tool_choice="required") for schema in HOSTILE_SCHEMAS),
    *(make_chat(response_format=make_schema_format(schema)) for schema in HOSTILE_SCHEMAS),
    make_completion(max_tokens=10**18),
    *(body for seed in (0, -1, 2**63 - 1, 2**64) for body in make_chat_and_completion(seed=seed)),
    *(body for number in (2**31, -(2**63), 2**70) for body in make_chat_and_completion(priority=number)),
    make_completion(prompt="\x00"),
    make_completion(prompt="\U0010ffff\u202e\ufeff"),
    make_completion(prompt=""),
    make_completion(structured_outputs={"regex": "(a|a)*" * 50}),
    make_completion(structured_outputs={"grammar": "root ::= root"}),
    make_chat(messages=[{"role": "user", "content": "<|im_end|>" * 100}]),
]
"""Requests that the server may refuse or answer."""

HUGE_REQUESTS: list[tuple[str, Any]] = [
    make_chat(messages=[{"role": "user", "content": "x" * 20_000_000}]),
    make_chat(messages=MESSAGES * 100_000),
    make_chat(tools=make_tools({}) * 50_000),
    make_completion(prompt="Hi there. " * 2_000_000),
    make_completion(prompt=[5] * 8_000_000),
    make_chat(response_format=make_schema_format(LARGE_SCHEMA)),
    make_chat(tools=make_tools(LARGE_SCHEMA), tool_choice="required"),
]
"""Requests with very long bodies, and grammars that exceed the compilation limits."""

# fmt: off
RAW_BODIES: list[bytes] = [
    b"", b" ", b"\x00", b"{", b"}", b"[", b"[]", b"[{}]", b"null", b"true", b"5", b'"model"', b"{}", b"\xff",
    b"\xfe\xff", b"\xef\xbb\xbf{}", b"<xml/>", b"model=demo&prompt=Hi", b"//c\n{}", b"{'model': 'demo'}",
    b'{"model": "demo"} trailing', b'{"model": "demo", "prompt": "Hi",}', b'{"prompt": "a\nb"}',
    b'{"model": "demo", "model": "demo", "prompt": "Hi"}',
    b'{"model": "demo", "prompt": "\xc3"}', b'{"model": "demo", "prompt": "\xed\xa0\x80"}',
    b'{"model": "demo", "prompt": "\\ud800"}', b'{"messages": [{"role": "user", "content": "\\udfff"}]}',
    b'{"temperature": NaN}', b'{"temperature": Infinity}', b'{"temperature": -Infinity}', b'{"top_p": 1e999}',
    b'{"seed": ' + b"9" * 100_000 + b"}", b'{"top_p": 0.' + b"1" * 100_000 + b"}",
    b'{"n": 1.}', b'{"n": +1}', b'{"n": 0x1}', b"[" * 1_000_000,
    nest(100).encode(), nest(100_000).encode(), nest(100_000, '{"a":', "}").encode(),
    b'{"messages": ' + nest(60).encode() + b"}", b'{"metadata": ' + nest(500).encode() + b"}",
]
# fmt: on


def bodies_with_unusual_values(stride: int) -> Iterator[tuple[str, Any]]:
    """Yield pairs of a path and a body in which one field has a value that most fields refuse.

    Each field gets every ``stride``-th value of `UNUSUAL_VALUES`. The first value differs between fields.
    """
    for path, (body_class, body) in ROUTES.items():
        for index, name in enumerate([*body_class.model_fields, *UNSUPPORTED.get(body_class, {})]):
            for value in UNUSUAL_VALUES[index % stride :: stride]:
                yield path, {**body, name: value}


@pytest.fixture(autouse=True)
def _check_server_afterwards(server: ServerProcess) -> Iterator[None]:
    metrics_before = server.metrics()
    yield
    metrics_after = server.wait_until_idle()
    assert metrics_after["penstock_worker_restarts_total"] == metrics_before["penstock_worker_restarts_total"]
    assert not [
        name
        for name in metrics_after
        if 'status="5' in name and metrics_after[name] > metrics_before.get(name, 0)
    ]
    assert server.complete()["usage"]["completion_tokens"] == 5


async def test_each_field_refuses_or_accepts_some_unusual_values(server: ServerProcess) -> None:
    statuses = await post_all(server, encode_bodies(bodies_with_unusual_values(12)))
    assert statuses.keys() <= {200, 400, 404}
    assert statuses[400] > 200


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_each_field_refuses_or_accepts_all_unusual_values(server: ServerProcess) -> None:
    statuses = await post_all(server, encode_bodies(bodies_with_unusual_values(1)))
    assert statuses.keys() <= {200, 400, 404}
    assert statuses[400] > 2000


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_huge_requests_are_refused_while_another_client_is_answered(server: ServerProcess) -> None:
    """The other client gets every response within 10 seconds."""
    other_client_task = asyncio.create_task(keep_requesting(server))
    statuses = await post_all(server, encode_bodies(HUGE_REQUESTS), seconds=600)
    assert statuses.keys() <= {400, 413}
    other_client_task.cancel()
    await asyncio.wait([other_client_task])
    assert other_client_task.cancelled()


async def keep_requesting(server: ServerProcess) -> None:
    """Send short requests until cancelled. Each response must arrive within 10 seconds."""
    async with httpx.AsyncClient(base_url=server.url, timeout=10) as client:
        while True:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/v1/models")).status_code == 200


async def test_malformed_requests_are_refused(server: ServerProcess) -> None:
    statuses = await post_all(server, encode_bodies(REFUSED_REQUESTS))
    assert statuses.keys() <= {400, 404, 413}


async def test_unusual_requests_are_refused_or_answered(server: ServerProcess) -> None:
    statuses = await post_all(server, encode_bodies(UNUSUAL_REQUESTS))
    assert statuses.keys() <= {200, 400}


async def test_malformed_raw_bodies_are_refused(server: ServerProcess) -> None:
    statuses = await post_all(server, [(path, raw_body) for path in ROUTES for raw_body in RAW_BODIES])
    assert statuses.keys() == {400}


def encode_bodies(bodies: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, bytes]]:
    return ((path, json.dumps(body).encode()) for path, body in bodies)


async def post_all(
    server: ServerProcess, bodies: Iterable[tuple[str, bytes]], *, seconds: float = TIME_LIMIT
) -> dict[int, int]:
    """Post the bodies with four concurrent clients. Return status -> number of responses.

    Check that each response arrives within `seconds`, that no status is 500 or above, and that errors have
    the format of the API.
    """
    statuses: dict[int, int] = {}
    remaining_bodies = iter(bodies)

    async def run_client(client: httpx.AsyncClient) -> None:
        for path, data in remaining_bodies:
            try:
                answer = await asyncio.wait_for(client.post(path, content=data), seconds)
            except TimeoutError:
                pytest.fail(f"no response: {path} {data[:300]!r}")
            status = answer.status_code
            statuses[status] = statuses.get(status, 0) + 1
            assert status < 500, (path, data[:300], answer.text)
            if status != 200:
                check_error(answer.json(), path, data)
                assert len(answer.content) < 5000

    async with httpx.AsyncClient(
        base_url=server.url, timeout=None, headers={"content-type": "application/json"}
    ) as client:
        await asyncio.gather(*(run_client(client) for _ in range(4)))
    return statuses


def check_error(answer: Any, path: str, data: bytes) -> None:
    details = (path, data[:300], answer)
    assert answer.keys() == {"error"}, details
    error = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}, details
    assert error["type"] == "invalid_request_error", details
    assert isinstance(error["message"], str), details
    assert error["message"], details
    assert error["param"] is None or isinstance(error["param"], str), details
    assert error["code"] is None or isinstance(error["code"], str), details


VALID_BODY = json.dumps({"model": "demo", "prompt": "Hi", "max_tokens": 2}).encode()


def encode_chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


TRANSFER_ENCODING = {"transfer-encoding": "chunked"}


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (
            post_head(COMPLETION_PATH, None, **TRANSFER_ENCODING)
            + encode_chunked(VALID_BODY[:5], VALID_BODY[5:6], VALID_BODY[6:]),
            200,
        ),
        (post_head(COMPLETION_PATH, None, **TRANSFER_ENCODING) + encode_chunked(b"{"), 400),
        (post_head(COMPLETION_PATH, None, **TRANSFER_ENCODING) + encode_chunked(), 400),
        (post_head(COMPLETION_PATH, None, **TRANSFER_ENCODING) + b"zz\r\n", 400),
        (post_head(COMPLETION_PATH, None, **TRANSFER_ENCODING) + encode_chunked(*[b"x" * 2**20] * 33), 413),
        (post_head(COMPLETION_PATH, 2**40), 413),
        (post_head(COMPLETION_PATH, -5) + VALID_BODY, 400),
        (post_head(COMPLETION_PATH, None, **{"content-length": "ten"}) + VALID_BODY, 400),
        (post_head(COMPLETION_PATH, 0), 400),
        (post_head(COMPLETION_PATH, None), 400),
        (post_head(COMPLETION_PATH, len(VALID_BODY), **{"content-type": "text/plain"}) + VALID_BODY, 415),
        (
            post_head(COMPLETION_PATH, len(VALID_BODY), **{"content-type": "multipart/form-data; boundary=x"})
            + VALID_BODY,
            415,
        ),
        (
            post_head(
                COMPLETION_PATH, len(VALID_BODY), **{"content-type": "application/json; charset=utf-16"}
            )
            + VALID_BODY,
            415,
        ),
        (
            post_head(COMPLETION_PATH, len(VALID_BODY), **{"content-type": "application/json; charset=UTF-8"})
            + VALID_BODY,
            200,
        ),
        (post_head(COMPLETION_PATH, len(VALID_BODY), **{"content-encoding": "gzip"}) + VALID_BODY, None),
        (post_head(COMPLETION_PATH, len(VALID_BODY), **{"x-request-id": "a" * 5000}) + VALID_BODY, 200),
        (post_head(COMPLETION_PATH, len(VALID_BODY), **{"expect": "100-continue"}) + VALID_BODY, 200),
        (b"POST /v1/completions HTTP/9.9\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10, 400),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nhost: b\r\nx" + b"y" * 100_000 + b": 1\r\n\r\n", None),
        (b"PUT /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n", 405),
        (b"BREW /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n", None),
        (b"GET /v1/models/%00%ff%2f..%2f.. HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
        (b"GET /v1/../../etc/passwd HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
    ],
    ids=lambda value: None if isinstance(value, int) else ascii(value[-40:])[2:-1] if value else "any",
)
async def test_malformed_or_unusual_http_gets_the_expected_status(
    server: ServerProcess, request_bytes: bytes, status: int | None
) -> None:
    async with asyncio.timeout(TIME_LIMIT), raw_exchange(server.port, COMPLETION_PATH) as exchange:
        exchange.send(request_bytes)
        actual_status, headers = await exchange.head()
        if actual_status == 100:
            actual_status, headers = await exchange.head()
        body = json.loads(await exchange.body(headers))
    assert actual_status == status or (status is None and actual_status in (200, 400, 404, 405, 415, 431)), (
        body
    )
    if actual_status != 200:
        assert body["error"].keys() == {"message", "type", "param", "code"}
